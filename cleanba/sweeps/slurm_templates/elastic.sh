# What `launch` does with ELASTIC=1: the run goes on when a node is lost, and takes the node back.
#
# Each node has its own step (an `srun` for one node) within the job's allocation, which --no-kill keeps.  When one step
# ends too early, the processes of the others notice it and end; any that do not end are killed.  Then the same command
# goes on from the newest checkpoint, on the largest number of answering nodes that the experiment can be divided among.
# When a node answers again, SIGUSR1 ends the steps, once this start has written a checkpoint, and the command goes on
# with that node.

ANSWER_SECONDS=20 # in which a node has to run `true`
NOTICE_SECONDS=15 # after one step has failed: time for the others to end by themselves
ENDING_SECONDS=60 # after one step has ended as it should: time for the others to write a checkpoint
LOOK_SECONDS=15   # between looks at nodes that could be taken back
SHORT_SECONDS=200 # before the job's time limit: too late for a new start
RETRIES=5         # failures in a row without a new checkpoint between them

# elastic ppo FLAGS …  Returns 0 once the run is finished, 138 when the job is to be requeued, else the run's exit code.
elastic() {
    local words=("$@") most=${CLEANBA_NODES:-$SLURM_JOB_NUM_NODES} fits run nodes used
    local code newest earlier retries=0 attempt=0 more began said
    # The numbers of processes that fit the experiment, and the run's directory, which must be the same for all steps.
    said=$(JAX_PLATFORMS=cpu "${CLEANBA[@]}" slurm fit $((most * tasks_here)) "${words[@]}") ||
        return 2 # the reason has been printed
    { read -r -a fits && IFS= read -r run; } < <(tail -n 2 <<<"$said") # environments may print when they are imported
    while true; do
        mapfile -t nodes < <(job_nodes | those_that_answer)
        used=$(nodes_to_use "${#nodes[@]}")
        if [ "$used" -eq 0 ]; then
            say "no node answers, or too few for this experiment (${fits[*]} processes fit)" >&2
            retries=$((retries + 1))
            [ "$retries" -le "$RETRIES" ] || return 1
            sleep "$LOOK_SECONDS"
            continue
        fi
        if [ "$attempt" -gt 0 ] && [ "$(seconds_left)" -lt "$SHORT_SECONDS" ]; then
            say "the job's time is nearly over" # Slurm's warning may have come while no step was running
            return 138
        fi
        newest=$(newest_checkpoint) earlier=$(which_result) attempt=$((attempt + 1)) more="" began=$SECONDS
        say "start $attempt, on $used of $most nodes (${nodes[*]:0:used}), from checkpoint ${newest:-none}"
        wait_for_lock
        start_steps "${nodes[@]:0:used}"
        while all_steps_run; do
            sleep 1
            if [ -z "$more" ] && [ "$used" -lt "$most" ] && time_to_look && find_more; then
                say "there are more nodes ($more): ending with a checkpoint, to resume with them"
                kill -USR1 "${steps[@]}" 2>/dev/null
            fi
        done
        end_steps
        code=$(exit_code)
        case $code in
            0 | 2 | 130) return "$code" ;;
            143) if preempted; then return 143; fi ;;& # else a process or its node was told to end
            138) [ "$more" = "in this allocation" ] || return 138 ;; # else out of time, or requeued for more nodes
            *)
                if failed_by_itself; then return "$code"; fi
                if [ "$(newest_checkpoint)" = "$newest" ]; then retries=$((retries + 1)); else retries=0; fi
                [ "$retries" -le "$RETRIES" ] || return "$code"
                say "a process or a node was lost (exit code $code) after $((SECONDS - began)) s; resuming"
                ;;
        esac
    done
}

# Seconds until the job's time limit.
seconds_left() {
    local text days=0 total=0 part parts
    text=$(squeue --noheader --jobs="$job" --format=%L 2>/dev/null)
    case $text in "" | *[!0-9:-]*) echo 999999999 && return ;; esac # there is none, or Slurm does not answer
    if [[ $text == *-* ]]; then days=${text%%-*} text=${text#*-}; fi
    IFS=: read -r -a parts <<<"$text"
    for part in "${parts[@]}"; do total=$((60 * total + 10#$part)); done
    echo $((86400 * days + total))
}

say() { echo "elastic, $(date +%T): $*"; }

# The job's nodes, one a line; Slurm takes those that are down out of the allocation.
job_nodes() {
    local list
    list=$(squeue --noheader --jobs="$job" --format=%N 2>/dev/null)
    scontrol show hostnames "${list:-$SLURM_JOB_NODELIST}"
}

# The nodes on standard input that run `true` within ANSWER_SECONDS, in the same order.  All are asked at once.
those_that_answer() {
    local node nodes answered
    mapfile -t nodes
    answered=$(
        for node in "${nodes[@]}"; do
            { timeout --signal=KILL "$ANSWER_SECONDS" srun --overlap --quiet --input=none --nodes=1 --ntasks=1 \
                --ntasks-per-node=1 --nodelist="$node" true >/dev/null && echo "$node"; } &
        done
        wait
    )
    printf '%s\n' "${nodes[@]}" | grep -xF "$answered"
} 2>/dev/null

# nodes_to_use N: the largest number of nodes up to N whose processes fit the experiment; 0 if there is none.
nodes_to_use() {
    local n=$1
    until [ "$n" -eq 0 ] || [[ " ${fits[*]} " == *" $((n * tasks_here)) "* ]]; do n=$((n - 1)); done
    echo "$n"
}

newest_checkpoint() { ls "$run/checkpoints" 2>/dev/null | grep -x '[0-9]*' | sort -n | tail -n 1; }

# A process that was lost may hold the run's directory until Slurm has killed it.
wait_for_lock() { [ ! -e "$run/.lock" ] || flock --timeout "$ENDING_SECONDS" "$run/.lock" true; }

# start_steps NODE …: the run's processes, those of the first node first.  Each start has a port of its own.
start_steps() {
    local node address first=0
    address=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    address+=":$((61440 + (SLURM_JOB_ID + 131 * attempt) % 4096))"
    steps=()
    for node; do
        FIRST_PROCESS=$first srun --overlap --wait=60 --input=none --nodes=1 --ntasks="$tasks_here" \
            --nodelist="$node" ${SRUN[@]+"${SRUN[@]}"} bash -c "$take_share" task "${CLEANBA[@]}" "${words[@]}" --run-dir "$run" \
            --coordinator-address "$address" --num-processes $(($# * tasks_here)) &
        steps+=($!)
        first=$((first + tasks_here))
    done
}

all_steps_run() {
    local step
    for step in "${steps[@]}"; do kill -0 "$step" 2>/dev/null || return 1; done
}

any_step_runs() { kill -0 "${steps[@]}" 2>/dev/null; }

# One step has ended.  Give the others their time, kill what is left, and note all exit codes.
end_steps() {
    local i patience=$NOTICE_SECONDS deadline
    codes=()
    note_ended
    case " ${codes[*]} " in *" 0 "* | *" 138 "* | *" 143 "*) patience=$ENDING_SECONDS ;; esac
    deadline=$((SECONDS + patience))
    while any_step_runs && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.5; done
    if any_step_runs; then
        squeue --steps --noheader --jobs="$job" --format=%i | grep '\.[0-9]*$' | xargs -r scancel
        sleep 2
        kill -KILL "${steps[@]}" 2>/dev/null
        while any_step_runs; do sleep 0.1; done
    fi
    note_ended
}

# Note the exit codes of steps that have ended.
note_ended() {
    local i
    for i in "${!steps[@]}"; do
        if [ -z "${codes[i]:-}" ] && ! kill -0 "${steps[i]}" 2>/dev/null; then
            wait "${steps[i]}" 2>/dev/null
            codes[i]=$?
        fi
    done
}

# The exit code for all steps together: 2 if one is 2, else the highest.
exit_code() { printf '%s\n' "${codes[@]}" | sort -n | awk '{ seen[$1]; last = $1 } END { print 2 in seen ? 2 : last }'; }

# What tells the run's result.json from an earlier one; empty if there is none.
which_result() { stat --format=%i:%Y "$run/result.json" 2>/dev/null; }

# Whether an error in the run itself ended it, which would happen again, rather than the loss of a process.
failed_by_itself() {
    [ "$(which_result)" != "$earlier" ] &&
        grep -q '"status": "failed"' "$run/result.json" &&
        ! grep -Eq '"error": "Failure: process [0-9]+ of [0-9]+ (died|said nothing)' "$run/result.json"
} 2>/dev/null

# Whether to look for more nodes: now and then, once this start has written a checkpoint, and not right before the job's
# time limit.
time_to_look() {
    [ $(((SECONDS - began) % LOOK_SECONDS)) -eq 0 ] && [ "$(newest_checkpoint)" != "$newest" ] &&
        [ "$(seconds_left)" -gt $((SHORT_SECONDS + 100)) ]
}

# Sets `more` to where more nodes would come from; fails if there are none.
find_more() {
    local here back idle had
    mapfile -t here < <(job_nodes)
    if [ "$(nodes_to_use "${#here[@]}")" -gt "$used" ]; then
        mapfile -t back < <(printf '%s\n' "${here[@]}" | grep -vxF "$(printf '%s\n' "${nodes[@]:0:used}")" |
            those_that_answer)
        if [ "$(nodes_to_use $((used + ${#back[@]})))" -gt "$used" ]; then
            more="in this allocation"
            return
        fi
    fi
    # Only a requeue brings back nodes that Slurm took out of the allocation.  One that brought none is not repeated.
    had=$(scontrol show job "$job" | sed -n 's/.*Comment=elastic: had \([0-9]*\).*/\1/p')
    idle=$(sinfo --noheader --partition="$SLURM_JOB_PARTITION" --states=idle --Node --format=%N | sort -u | wc -l)
    [ "$idle" -gt 0 ] && [ "${#here[@]}" -lt "$most" ] && [ "${#here[@]}" -gt "${had:-0}" ] &&
        [ "$(nodes_to_use $((${#here[@]} + idle < most ? ${#here[@]} + idle : most)))" -gt "$used" ] &&
        [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ] &&
        scontrol update JobId="$job" Comment="elastic: had ${#here[@]}" &&
        more="by a requeue"
}
