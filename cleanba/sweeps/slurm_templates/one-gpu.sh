#!/bin/bash
# One GPU, which acts and learns (a0-l0); docs/guides/gpu.md.
#
#     slurm/submit slurm/one-gpu.sh ppo --env-id Breakout-v5
#SBATCH --job-name=cleanba
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=10
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
# Slurm sends USR1 120 seconds before the time limit.  The run then ends after its current update, with a checkpoint,
# the job is requeued, and the run goes on exactly where it ended.  Partition, account and so on are set in settings.sh.
source "${CLEANBA_SLURM:-slurm}/launch.sh"

launch "$1" --actor-device-ids 0 --learner-device-ids 0 "${@:2}"
