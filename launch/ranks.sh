#!/usr/bin/env bash
# The ranks of one node: Composer's launcher, with the rendezvous set by variables.
#
#   launch/ranks.sh [PROGRAM.py] [RUN.yaml] [key=value ...]
#
# RANKS_PER_NODE   ranks here; else LOCAL_WORLD_SIZE, DGXNGPU, the GPUs that Slurm gives, those that nvidia-smi or rocm-smi see, or 1
# NUM_NODES        else WORLD_SIZE over the ranks of a node, Slurm's nodes, or 1
# NODE_RANK, MASTER_ADDR, MASTER_PORT     where there are more nodes than one
# RANK_LOGS        folder of rankN.txt, what each rank says; rank 0 stays on this script's own output
#
# Composer's launcher gives its ranks 30 seconds after SIGTERM, too little for some checkpoints, and dies of SIGUSR1 without a
# word to them. Here the ranks hear both, write a checkpoint at the next batch edge and end. Exit code: the launcher's; 143
# and 138: stopped by that signal, also during startup; 2: it cannot run.
set -uo pipefail
# shellcheck source=launch/waiting.sh
source "$(dirname "${BASH_SOURCE[0]}")/waiting.sh"
here=$(hostname)
node=${NODE_RANK:-${SLURM_NODEID:-0}}
pass_on() { pkill "-$1" -P "$2" || kill -TERM "$2" 2>/dev/null || true; }  # no rank was started yet: the launcher itself
leave() { [ -z "${RANK_LOGS:-}" ] || echo "$1" >"$RANK_LOGS/code.$node"; exit "$1"; }
refuse() { echo "$here: $*" >&2; leave 2; }
whole() { [[ $1 =~ ^[0-9]{1,6}$ ]] && echo $((10#$1)); }  # 08 would be octal to the shell's arithmetic

count_gpus() {
  if command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU '
  elif command -v rocm-smi >/dev/null; then rocm-smi --showid 2>/dev/null | grep -o '^GPU\[[0-9]*\]' | sort -u | grep -c .
  fi; }

# A function, so that the shell has read all of it: a checkout may change while a run goes on.
main() {
  case ${1:-} in *.py) ;; *) set -- benchmark.py "$@";; esac

  local given ranks nodes port rank words code left
  given=${RANKS_PER_NODE:-${LOCAL_WORLD_SIZE:-${DGXNGPU:-${SLURM_GPUS_ON_NODE:-$(count_gpus)}}}}
  ranks=$(whole "${given:-1}") || refuse "RANKS_PER_NODE is '$given'. Possible: a number of ranks."
  [ "$ranks" -gt 0 ] || ranks=1
  given=${NUM_NODES:-${SLURM_STEP_NUM_NODES:-1}}
  if [ -z "${NUM_NODES:-}" ] && [ -n "${WORLD_SIZE:-}" ]; then
    given=$(whole "$WORLD_SIZE") && given=$((given % ranks ? 0 : given / ranks))
    [ "${given:-0}" -gt 0 ] || refuse "WORLD_SIZE is '$WORLD_SIZE'. Possible: a multiple of the $ranks ranks of a node; or give NUM_NODES."
  fi
  nodes=$(whole "$given") && [ "$nodes" -gt 0 ] || refuse "NUM_NODES is '$given'. Possible: a number of nodes, from 1 on."
  if [ "$nodes" -gt 1 ] || [ -n "${NODE_RANK:-}" ]; then
    rank=$(whole "$node") && [ "$rank" -lt "$nodes" ] ||
      refuse "NODE_RANK is '$node'. Possible: from 0 to $((nodes - 1)), the number of nodes being $nodes. NUM_NODES sets it."
    node=$rank
  fi
  port=${MASTER_PORT:-}
  if [ -n "$port" ]; then
    port=$(whole "$port") && [ "$port" -gt 0 ] && [ "$port" -lt 65536 ] || refuse "MASTER_PORT is '$MASTER_PORT'. Possible: a number from 1 to 65535."
  fi

  command -v composer >/dev/null || refuse "no composer on the PATH. Activate the environment before sbatch, as docs/launching.md says."
  words=(--nproc "$ranks")
  if [ "$nodes" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] && [ -n "$port" ] ||
      refuse "MASTER_ADDR or MASTER_PORT is not given, and there are $nodes nodes. Give the name of the first, and a free port of it."
    [ -n "${NODE_RANK:-${SLURM_NODEID:-}}" ] ||
      refuse "NODE_RANK is not given, and there are $nodes nodes. Give each its own: 0 on that of MASTER_ADDR, up to $((nodes - 1))."
    words+=(--world_size $((nodes * ranks)) --node_rank "$node" --master_addr "$MASTER_ADDR" --master_port "$port")
  fi
  if [ -n "${RANK_LOGS:-}" ]; then
    words+=(--stdout "$RANK_LOGS/rank{rank}.txt" --stderr "$RANK_LOGS/rank{rank}.txt")
    [ "$node" = 0 ] || exec >>"$RANK_LOGS/rank$((node * ranks)).txt" 2>&1
    echo "{\"at\": \"launcher\", \"unix_time\": $EPOCHREALTIME, \"node\": $node, \"start\": ${SLURM_RESTART_COUNT:-0}}" >>"$RANK_LOGS/times.jsonl"
  fi

  run_to_its_end composer "${words[@]}" "$@"
  code=$?
  # What a signal ended before it was heard: a rank that loads its libraries, whose -15 or -10 is the launcher's code, or the launcher.
  case ${heard:-none}.$code in
    none.*) ;;
    *.246 | USR1.241 | USR1.143) code=138;;
    *.241) code=143;;
  esac
  # A launcher that was killed leaves its ranks, which would train on, and hold the GPUs. All are in the group of Slurm's task.
  if [ "$code" != 0 ] && [ -n "${SLURM_TASK_PID:-}" ] && command -v pgrep >/dev/null; then
    for left in $(pgrep -g "$SLURM_TASK_PID" || true); do
      case " $$ $PPID $SLURM_TASK_PID " in *" $left "*) ;; *) kill -KILL "$left" 2>/dev/null || true;; esac
    done
  fi
  leave "$code"
}

main "$@"
