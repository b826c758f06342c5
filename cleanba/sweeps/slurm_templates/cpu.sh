#!/bin/bash
# A cluster without GPUs: one process per node, whose CPU acts and learns.
#
#     slurm/submit slurm/cpu.sh ppo --env-id Breakout-v5 --network nature
#
# Nodes and CPU cores are set in settings.sh.  One node also works (--nodes=1 before the template).
#SBATCH --job-name=cleanba
#SBATCH --nodes=2
#SBATCH --cpus-per-task=16
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
# Slurm sends USR1 120 seconds before the time limit.  The run then ends after its current update, with a checkpoint,
# the job is requeued, and the run goes on exactly where it ended.
export JAX_PLATFORMS=cpu
source "${CLEANBA_SLURM:-slurm}/launch.sh"

launch "$1" --distributed --actor-device-ids 0 --learner-device-ids 0 "${@:2}"
