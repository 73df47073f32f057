#!/bin/bash
#SBATCH --account=m1234
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --requeue

run=/home/me/runs/digits
requeue=yes
export PACELINE_SET='{"name": "digits", "runs": "/home/me/runs"}'
command=(
  srun --nodes=2 --ntasks=8 --kill-on-bad-exit=1
  /home/me/venv/bin/python -u -m paceline.launch.task path /home/me/runs/digits/code/0123456789ab/code/digits.py epochs=3
)

# ---- the same for every job from here on ----
jobs="$run/jobs" id="$SLURM_JOB_ID"
umask 077

say() { echo "paceline: $*" >&2; }

if [ -e "$jobs/over" ]; then
  say "this run is over: $(cat "$jobs/over")"
  exit 0
fi
rm -f "$jobs/$id.stopped"*

# Each rank finds out itself who it is; what this shell knows of that is wrong for all ranks but one.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT
# Since Slurm 22.05 srun does not take the cores of a task from sbatch.
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PACELINE_INCARNATION="${1:-$id}:$((${2:-0} * 100000 + ${SLURM_RESTART_COUNT:-0}))"
export PACELINE_PROGRESS="$jobs/progress" PACELINE_STOPPED="$jobs/$id.stopped"
# Not every Slurm tells a job when it ends.
end=$(date --date "$(squeue --noheader --jobs "$id" --format %e)" +%s 2>/dev/null)
export PACELINE_DEADLINE="$end"

progress() { cat "$jobs/progress" 2>/dev/null; }

# What an earlier start of this job left says that it did not end in order: nodes that are gone are not asked for again.
if [ -e "$jobs/$id.nodes" ]; then
  sinfo --noheader --Node --nodes "$(cat "$jobs/$id.nodes")" --states down,fail,drain --format %N >>"$jobs/failed-nodes"
fi
echo "$SLURM_JOB_NODELIST" >"$jobs/$id.nodes"

ask_to_stop() {
  say "the time limit is near, or this job is to make room: asking the ranks to save and leave"
  scancel --signal=USR1 "$id"
}
trap ask_to_stop USR1
trap : TERM # the ranks get it as well: see how they end

start=$(progress)
say "job $id, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST, at $(date '+%F %T')"
listen() {
  trap '' USR1 TERM # which may come to all processes of the job: the last words are still to be written down
  exec tee >(exec grep --line-buffered '^srun: error: ' >"$jobs/$id.errors")
}
"${command[@]}" 2> >(listen >&2) &
step=$!
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done # a signal ends `wait`, not the step

# Slurm itself puts a job back whose node it has lost, or that has to make room. This shell is then a thing of the past.
standing='' tries=0
while [ -z "$standing" ] && [ $((tries += 1)) -le 12 ]; do
  [ "$tries" -gt 1 ] && sleep 5 # Slurm's controller may be away for a moment
  standing=$(squeue --noheader --jobs "$id" --Format=State:.20,RestartCnt:.20 | xargs)
done
if [ "$standing" != "RUNNING ${SLURM_RESTART_COUNT:-0}" ] && { [ -z "$end" ] || [ "$(date +%s)" -lt "$end" ]; }; then
  say "Slurm has ended this start of the job ($standing)"
  exit "$code"
fi
rm -f "$jobs/$id.nodes"

over() {
  echo "$1" >"$jobs/over"
  [ -e "$jobs/chain" ] && grep --invert-match --line-regexp "$id" "$jobs/chain" | xargs --no-run-if-empty scancel --state=PENDING 2>/dev/null
  exit "$2"
}

# Go on later: back into the queue, or in the next job of the chain. Without progress, only so often.
again() {
  [ -e "$jobs/cancelled" ] && over "it was cancelled" 0
  if [ "$(progress)" = "$start" ]; then
    echo . >>"$jobs/idle"
    [ "$(wc -l <"$jobs/idle")" -ge 5 ] && over "stopped 5 times without a new checkpoint in between: ask for more time" 75
  else
    rm -f "$jobs/idle"
  fi
  if [ -z "$requeue" ]; then
    say "$1; the next job of the chain goes on"
    exit 75
  fi
  say "$1; back into the queue"
  trap '' TERM # which comes to every process of this shell, too, as soon as the job is back in the queue
  scontrol requeue "$id" || over "this site does not let a job back into the queue: submit a chain, --jobs 5" 75
  bad=$(sort --unique "$jobs/failed-nodes" 2>/dev/null | paste --serial --delimiters=,)
  [ -n "$bad" ] && scontrol update JobId="$id" ExcNodeList="$bad" && say "leaving out $bad"
  exit 0
}

if [ -e "$jobs/$id.stopped" ]; then
  again "saved and stopped"
elif [ "$code" -eq 0 ]; then
  over "it is complete" 0
elif [ "$(progress)" != "$start" ]; then
  # A task that died of a signal: maybe its node's fault.
  sed --quiet --regexp-extended 's/^srun: error: ([^: ]+): tasks? [^:]*: (Killed|Bus error|Segmentation fault|Aborted).*/\1/p' "$jobs/$id.errors" | head -1 >>"$jobs/failed-nodes"
  again "failed with exit code $code after new checkpoints"
fi
over "it failed with exit code $code: see $jobs/$id.log" "$code"
