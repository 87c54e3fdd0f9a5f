# shellcheck shell=bash
# What a batch script of this folder does, on the first node of the job: a launcher a node, and what follows when they end.
# Sourced with the words after the script's name; docs/launching.md says what happens when.
#
# LOGDIR          parent of JOB/rankN.txt, what each rank says; default logs
# MAX_RESTARTS    starts after the first one, at most; default 10
set -uo pipefail
: "${MAX_RESTARTS:=10}" "${LOGDIR:=logs}"
declare -p SRUN_OPTIONS >/dev/null 2>&1 || SRUN_OPTIONS=()
restarts=${SLURM_RESTART_COUNT:-0} leaving='' step='' pass_on=''
say() { TZ=UTC printf 'slurm: %(%Y-%m-%dT%H:%M:%SZ)T %s\n' -1 "$*"; }
mark() { echo "{\"at\": \"$1\", \"unix_time\": $EPOCHREALTIME, \"start\": $restarts}" >>"$RANK_LOGS/times.jsonl"; }
refuse() { say "$*"; exit 2; }
has_key() { local key=$1 word; shift; for word; do [[ $word != "$key="* ]] || return 0; done; return 1; }

trap 'leaving=TERM' TERM
trap 'leaving=limit; tell_ranks & pass_on=$!' USR1
# Repeated: a rank that is still loading its libraries does not hear it yet.
# shellcheck disable=SC2329
tell_ranks() { while kill -0 "$step" 2>/dev/null; do scancel --signal=USR1 "$SLURM_JOB_ID"; sleep 15; done; }

# --- the words ---
words=("$@")
case ${words[0]:-} in *.py | *.sh) ;; *) words=(benchmark.py "${words[@]}");; esac
if [ "${words[0]}" = benchmark.py ] && ! has_key run_name "${words[@]}" &&
  ! printf '%s\0' "${words[@]}" | grep -z '[.]ya\?ml$' | xargs -0r grep -qs -e '^run_name:' --; then
  words+=("run_name=slurm-$SLURM_JOB_ID")  # a name that it made up itself would be another one after each restart
  say "no run_name is given: it is slurm-$SLURM_JOB_ID"
fi

# --- the job ---
say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restarts: $restarts of $MAX_RESTARTS"
if scontrol show job -o "$SLURM_JOB_ID" | grep -q ' Requeue=0'; then
  say "this job was submitted without --requeue: when a node is lost, a rank dies or the time is up it ends, and nobody starts it again; the same sbatch command then resumes the run from its last checkpoint"
fi
RANK_LOGS=$(realpath -ms "$LOGDIR/$SLURM_JOB_ID")
mkdir -p "$RANK_LOGS" || refuse "LOGDIR: $RANK_LOGS cannot be made. Give LOGDIR=FOLDER before sbatch."
export RANK_LOGS
mark job
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  : "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
  : "${MASTER_PORT:=$((20000 + (SLURM_JOB_ID * 8 + restarts % 8) % 12000))}"  # below the ports that the kernel hands out
  while (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do
    say "port $MASTER_PORT is in use on $MASTER_ADDR; trying the next one"
    MASTER_PORT=$((MASTER_PORT + 1))
  done
  export MASTER_ADDR MASTER_PORT
  # Each node has to see the checkout and what this node has just made.
  # shellcheck disable=SC2016
  srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 bash -c 'for place in "$@"; do [ -e "$place" ] || { echo "$SLURMD_NODENAME: $place is not seen here, but on the first node. Wanted: a folder that all nodes share, for the checkout and for LOGDIR." >&2; exit 2; }; done' task "$PWD/launch/ranks.sh" "$RANK_LOGS" ||
    refuse "not all nodes see the same folders: see above"
fi
# A checkpoint may take most of the time before the limit. After a cancel it may be cut off, and is then not used.
grace=save.grace_sec=${GRACE_SEC:-150}

# --- the steps ---
run_step() { # WORDS...: a launcher a node; gives srun's code
  local script=launch/ranks.sh code=0 again words=("$@")
  case ${words[0]} in
    *.sh) script=${words[0]} words=("${words[@]:1}");;
    benchmark.py) has_key save.grace_sec "${words[@]}" || words+=("$grace");;
  esac
  rm -f "$RANK_LOGS"/code.*
  mark step
  srun --kill-on-bad-exit=1 --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" ${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"} bash "$script" "${words[@]}" &
  step=$!
  wait "$step" || code=$?
  while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done
  if [ -n "$leaving" ]; then  # the last `wait` may have given a signal's code
    again=0
    wait "$step" 2>/dev/null || again=$?
    [ "$again" = 127 ] || code=$again
  fi
  [ -z "$pass_on" ] || kill "$pass_on" 2>/dev/null || true
  mark ended
  return "$code"
}

code=0
run_step "${words[@]}" || code=$?

# --- what follows ---
[ "$code" != 0 ] || exit 0
cat "$RANK_LOGS"/code.* 2>/dev/null | grep -qx 2 && code=2
if [ "$code" = 2 ]; then refuse "refused: the configuration cannot run, see above and $RANK_LOGS. It is not started again."; fi
if [ "$leaving" = TERM ]; then
  say "ended by SIGTERM: a cancel, a preemption or a requeue. The same sbatch command resumes the run."
  exit "$code"
fi
why="a rank or a launcher ended with code $code, see $RANK_LOGS"
[ "$leaving" != limit ] || why="stopped before its time limit, code $code"
if [ "$restarts" -ge "$MAX_RESTARTS" ]; then
  say "$why; not started again: MAX_RESTARTS=$MAX_RESTARTS. The same sbatch command resumes the run."
  exit "$code"
fi
say "$why; the job is put into the queue again"
trap 'exit 0' TERM
if scontrol requeue "$SLURM_JOB_ID"; then sleep 60 & wait $!; fi
say "it cannot be put into the queue again. The same sbatch command resumes the run."
exit "$code"
