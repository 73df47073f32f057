#!/bin/bash
#SBATCH --account=m1234_g
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --requeue

run=/home/me/runs/digits
requeue=yes
foreign=
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}"
export PACELINE_SET='{"name": "digits", "runs": "/home/me/runs"}'
export PACELINE_INTERFACE=hsn0
export PACELINE_SEED=0
export NCCL_SOCKET_IFNAME=hsn
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-FATAL}"
surroundings() {
  :
}
command=(
  srun --nodes=2 --ntasks=8 --kill-on-bad-exit=1 --export=ALL
  /home/me/venv/bin/python -u -m paceline.launch.rank_srun path /home/me/runs/digits/code/0123456789ab/code/digits.py epochs=3
)
page=(/home/me/venv/bin/python -m paceline hang /home/me/runs/digits)

# ---- the same for every job from here on ----
#
# How a start of this job ends. "New checkpoint" means that the file `progress` has changed since the start.
#
#   what was seen                                            what follows
#   --------------------------------------------------------------------------------------------------------
#   `over` or `cancelled` exists when the job begins         exit 0: the run has ended
#   Slurm's state or restart count is of another start       exit with the code of the ranks: Slurm acts itself
#   srun could not start the ranks, no new checkpoint        again, without those nodes
#   $mark: all ranks have saved and stopped                  again
#   signalled, past the end, the ranks do not exit           again
#   killed by the request to stop before Python handles it   again
#   exit code 0                                              over, exit 0: cancel the rest of the chain
#   failed: a new checkpoint, or an old one and not 2 or 3   again: a node that killed a rank is left out
#   anything else                                            over, with the code of the ranks
#
# "again" requeues this job, or leaves it to the next job of the chain; the fifth time in a row without a new
# checkpoint is "over" with exit 75. USR1 (Slurm, before the time limit or at preemption) asks the ranks to stop;
# TERM reaches the ranks as well, so this shell only waits for them.
jobs="$run/jobs" id="$SLURM_JOB_ID" count="${SLURM_RESTART_COUNT:-0}"
mark="$jobs/$id.$count.stopped" kept="$jobs/$id.$count.code"
umask 077

say() { echo "paceline: $*" >&2; }
progress() { cat "$jobs/progress" 2>/dev/null; }
past_end() { [ -n "$end" ] && [ "$(date +%s)" -ge "$end" ]; }
ask_to_stop() {
  asked=yes
  say "the time limit is near, or Slurm preempts this job: asking the ranks to save and exit"
  scancel --signal=USR1 "$id"
}
asked='' ended='' end='' said=''
launch_failure='launch (for StepId=[^ ]+ )?failed|Unable to (create step|confirm allocation).*(timed out|onnection|contact)'
trap ask_to_stop USR1
trap 'ended=yes' TERM # the ranks get it as well: wait for them to exit

for word in over cancelled; do
  if [ -e "$jobs/$word" ]; then
    say "this run has ended: $(cat "$jobs/over" 2>/dev/null || echo "cancelled")"
    exit 0
  fi
done
surroundings

# Each rank detects its own rank; the values of this shell would be wrong for all ranks but one.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT
# Since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch.
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PACELINE_INCARNATION="${1:-$id}:$((${2:-0} * 100000 + count))"
export PACELINE_PROGRESS="$jobs/progress" PACELINE_STOPPED="$mark"
# Not every Slurm sets SLURM_JOB_END_TIME. (An empty --date would mean midnight.)
end=$(date --date "$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs "$id" --format %e | grep T || echo unknown)" +%s 2>/dev/null)
past_end && end=''
export PACELINE_DEADLINE="$end"

# If this file exists, an earlier start of this job was interrupted: exclude its nodes that are down.
if [ -e "$jobs/$id.nodes" ]; then
  sinfo --noheader --Node --nodes "$(cat "$jobs/$id.nodes")" --states down,fail,drain --format %N >>"$jobs/failed-nodes"
fi
echo "$SLURM_JOB_NODELIST" >"$jobs/$id.nodes"

listen() {
  trap '' USR1 TERM # Slurm may signal all processes of the job, and the last lines of srun must still be written
  tee /dev/fd/3 3>&1 >&2 | grep --line-buffered '^srun: error: ' >"$jobs/$id.errors"
}
start=$(progress)
say "job $id, start $((count + 1)), on $SLURM_JOB_NODELIST, at $(date '+%F %T')"
exec 3> >(listen)
listener=$!
{
  trap : USR1 TERM
  "${command[@]}"
  code=$?
  echo "$code" >"$kept" # `wait` can lose the exit code of a step that ends at the moment a signal arrives
  exit "$code"
} 2>&3- &
step=$! stuck=''
exec 3>&-
while wait "$step"; kill -0 "$step" 2>/dev/null; do # a signal interrupts `wait`, not the step
  if [ -n "$ended" ] && past_end; then
    sleep 15
    kill -0 "$step" 2>/dev/null && stuck=yes && break
  fi
done
trap '' USR1 TERM # from here on a signal must not interrupt the requeue
code=1
if [ -z "$stuck" ]; then
  wait "$step"
  code=$?
  [ -s "$kept" ] && code=$(cat "$kept")
fi
rm -f "$kept"
# The last lines of srun may still be in the pipe; wait for the listener, at most 60 s.
looks=0
while [ -z "$stuck" ] && kill -0 "$listener" 2>/dev/null && [ $((looks += 1)) -le 300 ]; do sleep 0.2; done
# Asked to stop, killed by that signal, no rank reported a failure: Python had no signal handler yet.
early=''
if [ -n "$asked$ended" ] && { [ "$code" -eq 138 ] || [ "$code" -eq 143 ]; } && [ "$(progress)" = "$start" ]; then
  ls -d "$mark"* >/dev/null 2>&1 || early=yes
fi

# Slurm itself requeues a job that lost a node or was preempted. This shell then belongs to an earlier start.
standing='' tries=0
while [ -z "$standing" ] && [ $((tries += 1)) -le 40 ]; do
  [ "$tries" -gt 1 ] && sleep 15 # slurmctld may be down for a while
  standing=$(squeue --noheader --jobs "$id" --Format=State:.20,RestartCnt:.20 2>/dev/null | xargs)
done
if [ "${standing##* }" != "$count" ] || { [ "${standing%% *}" != RUNNING ] && ! past_end; }; then
  say "Slurm has ended this start of the job (${standing:-squeue does not answer})"
  [ "$code" -eq 0 ] && [ -e "$mark" ] && exit 75
  exit "$code"
fi
rm -f "$jobs/$id.nodes"
# Write the failure report before the next start overwrites the files of the ranks.
[ "$code" -ne 0 ] && [ ! -e "$mark" ] && [ -z "$early" ] && [ ${#page[@]} -gt 0 ] && timeout 60 "${page[@]}" >/dev/null 2>&1

over() {
  echo "$1" >"$jobs/over"
  [ "$2" -ne 0 ] && say "$1"
  rm -f "$jobs/$id".*.stopped* "$jobs/$id.errors"
  [ -e "$jobs/chain" ] && grep --invert-match --line-regexp "$id" "$jobs/chain" | xargs --no-run-if-empty scancel --state=PENDING --user="$(id -u)" --name="$SLURM_JOB_NAME" 2>/dev/null
  exit "$2"
}

# Exclude the nodes that failed from a job, as long as enough other nodes remain.
leave_out_for() {
  bad=$(sort --unique "$jobs/failed-nodes" 2>/dev/null)
  [ -n "$1" ] && [ -n "$bad" ] || return
  # Nodes that are down do not count: a job with too few nodes to choose from would wait for ever.
  others=$(sinfo --noheader --Node --partition "$SLURM_JOB_PARTITION" --states idle,allocated,mixed,completing --format %N |
    sort --unique | grep --invert-match --line-regexp --fixed-strings --count "$bad")
  [ "$others" -ge "$SLURM_JOB_NUM_NODES" ] || return
  bad=$(echo "$bad" | paste --serial --delimiters=,)
  scontrol update JobId="$1" ExcNodeList="$bad" && say "excluding $bad"
}

# Continue later: requeue this job, or leave it to the next job of the chain. Without progress, at most 5 times.
again() {
  [ -e "$jobs/cancelled" ] && over "cancelled" 0
  if [ "$(progress)" != "$start" ]; then
    rm -f "$jobs/idle"
  else
    echo . >>"$jobs/idle"
    unsaved=' without a new checkpoint'
    [ -n "$foreign" ] && unsaved='' # what the script has saved is unknown
    [ "$(wc -l <"$jobs/idle")" -ge 5 ] && over "$1; this was the fifth time in a row$unsaved: see $jobs/$id.log, or request more time" 75
  fi
  if [ -z "$requeue" ]; then
    say "$1; the next job of the chain continues"
    leave_out_for "$(grep --after-context=1 --line-regexp "$id" "$jobs/chain" 2>/dev/null | sed --quiet 2p)"
    exit 75
  fi
  say "$1; requeued"
  scontrol requeue "$id" || over "this site does not allow requeueing: submit a job chain with --jobs 5" 75
  leave_out_for "$id"
  exit 0
}

# Ranks that Slurm could not start, although the step is right: the next start may get other nodes.
unlaunched=$(grep --extended-regexp --max-count=1 "$launch_failure" "$jobs/$id.errors")
# A rank without the folder of the run cannot write there that it failed; srun ended the others, which took it for a request to stop.
unfit=$(sed --quiet --regexp-extended 's/.*Exited with exit code ([23])$/\1/p' "$jobs/$id.errors" | head -1)
if [ -n "$unfit" ] && [ "$(progress)" = "$start" ]; then
  rm -f "$mark"
  code=$unfit
  said=$(grep --extended-regexp '^(rank [0-9]+ \(.*\)|[^ ]+): error: ' "$jobs/$id.log" | grep --invert-match '^s' | tail -1)
fi

if [ -n "$unlaunched" ] && [ "$(progress)" = "$start" ]; then
  sed --quiet --regexp-extended 's/.* failed on node ([^ :]+):.*/\1/p' "$jobs/$id.errors" >>"$jobs/failed-nodes"
  again "Slurm could not start the ranks (${unlaunched#srun: error: })"
elif [ -e "$mark" ]; then
  again "saved and stopped"
elif [ -n "$stuck" ]; then
  again "the ranks did not exit in time"
elif [ -n "$early" ] && [ -n "$foreign" ]; then
  again "ended by the request to stop; the script resumes by its own checkpoints, if it saves any"
elif [ -n "$early" ]; then
  again "asked to stop before the training had started"
elif [ "$code" -eq 0 ]; then
  over "complete" 0
elif [ "$(progress)" != "$start" ] || { [ -n "$start" ] && [ "$code" -ne 2 ] && [ "$code" -ne 3 ]; }; then
  # Exit codes 2 and 3 (usage, environment) would only repeat; 76 means that a rank lost its peer. Of the other codes, the
  # first that is death by a signal may be the fault of its node.
  grep --invert-match 'exit code 76$' "$jobs/$id.errors" | head -1 | sed --quiet --regexp-extended 's/^srun: error: ([^] :[]+): task [0-9]+: (Killed|Bus error|Segmentation fault|Aborted).*/\1/p' >>"$jobs/failed-nodes"
  again "failed with exit code $code"
fi
over "failed with exit code $code${said:+, $said}: see $jobs/$id.log" "$code"
