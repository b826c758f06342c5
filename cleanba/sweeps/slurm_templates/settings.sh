# All that depends on your cluster, in one place.  slurm/submit reads it when it calls sbatch, and every job when it
# starts.  An empty value is not passed on: the template's line or the cluster's default applies.

PARTITION=        # sbatch --partition
ACCOUNT=          # sbatch --account
QOS=              # sbatch --qos
TIME=             # sbatch --time, such as 24:00:00; a job that runs out of it is requeued, and goes on by itself
GPUS=             # GPUs per node, for the templates that use several
GPU_TYPE=         # such as a100, on a cluster with several types
GPU_OPTION=--gpus-per-node= # how sbatch is asked for GPUs; some clusters want --gres=gpu:
CPUS=             # CPU cores per task: these step the emulators
MEMORY=           # sbatch --mem, per node, such as 64G
NODES=            # nodes, for the templates that use several
MORE=()           # further options of sbatch, such as (--constraint=ib --mail-type=FAIL)
SRUN=()           # further options of srun, such as those for a container: (--container-image=cleanba.sqsh)

MAX_RESTARTS=100  # a job gives up after this many restarts: see "Time limits" in docs/guides/clusters.md

ELASTIC=${ELASTIC:-}  # 1, here or in the environment: a job that loses a node goes on with the remaining ones, and uses
                      # the lost one again once it is back.  NODES is then a maximum: the job may start on fewer

# What a job does before anything else, in the folder it was submitted from: load modules, activate an environment …
# slurm/submit does it too, to check the flags before it calls sbatch.
prepare() {
    if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
}

# How a task calls Cleanba.  In a container, for example:
# CLEANBA=(apptainer exec --nv --bind "$PWD" cleanba.sif cleanba)
CLEANBA=(python -m cleanba)
