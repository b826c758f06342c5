#!/bin/bash
# Several nodes with several GPUs each, one process per node: on each node the first GPU acts and the others learn.
#
#     slurm/submit slurm/nodes.sh ppo --env-id Breakout-v5 --num-envs 240
#
# Nodes, GPUs per node and CPU cores are set in settings.sh.  The run directory must be on a file system that all nodes
# share.
#SBATCH --job-name=cleanba
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
# Slurm sends USR1 120 seconds before the time limit.  The run then ends after its current update, with a checkpoint,
# the job is requeued, and the run goes on exactly where it ended.
source "${CLEANBA_SLURM:-slurm}/launch.sh"

launch "$1" --distributed --actor-device-ids 0 --learner-device-ids "${LEARNERS[@]}" "${@:2}"
