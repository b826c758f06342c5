# What all templates share; they source it inside the job.
#
# DEVICES   how many devices each task has
# launch    runs Cleanba in every task, and requeues a job that was cut short, so that it goes on
source "${CLEANBA_SLURM:-slurm}/settings.sh"
source "${CLEANBA_SLURM:-slurm}/elastic.sh"

# Slurm's name for this job: in an array, the array's number alone would mean all of its elements.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
tasks_here=${SLURM_NTASKS_PER_NODE:-1}
if [ -n "${CLEANBA_CPU:-}" ]; then
    DEVICES=$((4 / tasks_here > 0 ? 4 / tasks_here : 1))
    export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=$DEVICES
else
    DEVICES=$((${SLURM_GPUS_ON_NODE:-$tasks_here} / tasks_here))
fi

# If there are several devices, the first is the actor's alone.
if [ "$DEVICES" -gt 1 ]; then LEARNERS=($(seq 1 $((DEVICES - 1)))); else LEARNERS=(0); fi

# Every task may use all GPUs of its node, so that NCCL copies from one to another directly, but takes only its share.
take_share='first=$((SLURM_LOCALID * DEVICES)); JAX_LOCAL_DEVICE_IDS=$(seq -s , $first $((first + DEVICES - 1)))
export JAX_LOCAL_DEVICE_IDS; exec "$@" ${FIRST_PROCESS:+--process-id $((FIRST_PROCESS + SLURM_PROCID))}'

# Whether the job is being preempted.  Where it gets a grace time for that, Slurm sends SIGTERM first, and requeues only
# jobs that outlast it.
preempted() { scontrol show job "$job" 2>/dev/null | grep -q 'PreemptTime=[0-9]'; }

# launch ppo FLAGS …
launch() {
    local code=0 begun=$SECONDS why
    prepare
    export DEVICES
    if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05 a step does not inherit it from its job
    fi
    trap : USR1 # it is meant for the tasks, but `scancel --full` sends it to this shell too
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}"
    if [ -n "${ELASTIC:-}" ] && [[ " $* " == *" --distributed "* ]]; then
        elastic "$@" || code=$?
    else
        # After one task has ended, the others have a minute to write a checkpoint, or to notice that it is gone.
        srun --wait=60 ${SRUN[@]+"${SRUN[@]}"} bash -c "$take_share" task "${CLEANBA[@]}" "$@" || code=$?
    fi
    if [ "$code" -eq 143 ] && preempted; then code=138; fi
    if [ "$code" -eq 138 ]; then # 128 + SIGUSR1: out of time, or preempted
        why="cut short, and not requeued after ${SLURM_RESTART_COUNT:-0} restarts."
        if [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ]; then
            echo "cut short; job $job goes back into the queue and will resume from its last checkpoint"
            # Slurm ends this script.  If it ended by itself first, the job could still be taken for failed.
            scontrol requeue "$job" && sleep 300
            why="cut short, and Slurm has not requeued it."
        fi
    else
        why="failed with exit code $code after $((SECONDS - begun)) s on $SLURM_JOB_NODELIST; see the reason above."
    fi
    if [ "$code" -ne 0 ]; then
        echo "$why To resume from its last checkpoint, submit the same command with --run-dir and the run's directory" >&2
    fi
    exit "$code"
}
