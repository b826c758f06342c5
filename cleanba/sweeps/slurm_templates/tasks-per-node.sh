#!/bin/bash
# One node whose GPUs are divided among several processes.  With four GPUs, each of two tasks takes two: one acts, one
# learns.  Worth it where one Python process is too slow for all of a node's actors.
#
#     slurm/submit slurm/tasks-per-node.sh ppo --env-id Breakout-v5
#
# GPUs per node and CPU cores are set in settings.sh; the number of tasks is set below, or by --ntasks-per-node=4 before
# the template.
#SBATCH --job-name=cleanba
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
# Slurm sends USR1 120 seconds before the time limit.  The run then ends after its current update, with a checkpoint,
# the job is requeued, and the run goes on exactly where it ended.
source "${CLEANBA_SLURM:-slurm}/launch.sh"

launch "$1" --distributed --actor-device-ids 0 --learner-device-ids "${LEARNERS[@]}" "${@:2}"
