#!/bin/bash
# One node with several GPUs in one process: the first acts, the others learn (of four, a0-l1,2,3).
#
#     slurm/submit slurm/one-node.sh ppo --env-id Breakout-v5
#
# GPUs per node and CPU cores are set in settings.sh.  At most --num-shards GPUs can learn: 6 for PPO and IMPALA on
# Atari.  For more, raise --num-shards, which must divide --num-envs (docs/guides/clusters.md).
#SBATCH --job-name=cleanba
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
# Slurm sends USR1 120 seconds before the time limit.  The run then ends after its current update, with a checkpoint,
# the job is requeued, and the run goes on exactly where it ended.
source "${CLEANBA_SLURM:-slurm}/launch.sh"

launch "$1" --actor-device-ids 0 --learner-device-ids "${LEARNERS[@]}" "${@:2}"
