#!/bin/bash
# Several nodes with several GPUs each, one process per node: in each the first GPU acts and the others learn.
#
#     slurm/submit slurm/nodes.sh ppo --env-id Breakout-v5 --num-envs 240
#
# Nodes, GPUs per node and CPU cores are set in settings.sh.  The run directory must lie on a file system that all nodes
# see.
#SBATCH --job-name=cleanba
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
# USR1 comes 120 seconds before the time limit: the run ends after the update under way, with a checkpoint; it is
# requeued and goes on exactly.
source "${CLEANBA_SLURM:-slurm}/launch.sh"

launch "$1" --distributed --actor-device-ids 0 --learner-device-ids "${LEARNERS[@]}" "${@:2}"
