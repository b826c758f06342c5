#!/bin/bash
# A cluster without GPUs: one process per node, whose CPU acts and learns.
#
#     slurm/submit slurm/cpu.sh ppo --env-id Breakout-v5 --network nature
#
# Nodes and CPU cores are set in settings.sh; one node is fine, too (--nodes=1 before the template).
#SBATCH --job-name=cleanba
#SBATCH --nodes=2
#SBATCH --cpus-per-task=16
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
# USR1 comes 120 seconds before the time limit: the run ends after the update under way, with a checkpoint; it is
# requeued and goes on exactly.
export JAX_PLATFORMS=cpu
source "${CLEANBA_SLURM:-slurm}/launch.sh"

launch "$1" --distributed --actor-device-ids 0 --learner-device-ids 0 "${@:2}"
