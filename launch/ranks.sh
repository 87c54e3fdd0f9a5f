#!/usr/bin/env bash
# The ranks of one node: Composer's launcher, with the rendezvous of the other nodes' from variables.
#
#   launch/ranks.sh [PROGRAM.py] [RUN.yaml] [key=value ...]
#
# RANKS_PER_NODE   ranks here; else LOCAL_WORLD_SIZE, DGXNGPU, the GPUs that Slurm gives, those that nvidia-smi or rocm-smi see, or 1
# NUM_NODES        else WORLD_SIZE over the ranks of a node, Slurm's nodes, or 1
# NODE_RANK, MASTER_ADDR, MASTER_PORT     where there are more nodes than one
# RANK_LOGS        folder of rankN.txt, what each rank says; rank 0 stays on this script's own output
#
# Composer's launcher gives its ranks 30 seconds after SIGTERM, too little for some checkpoints, and dies of SIGUSR1 without a
# word to them. Here the ranks hear both, write a checkpoint at the next batch edge and end. Exit code: the launcher's; 143 and
# 138 say that the run was stopped so, 2 that it cannot run.
set -uo pipefail
# shellcheck source=launch/waiting.sh
source "$(dirname "${BASH_SOURCE[0]}")/waiting.sh"
here=$(hostname)
node=${NODE_RANK:-${SLURM_NODEID:-0}}
pass_on() { pkill "-$1" -P "$2" || kill -TERM "$2" 2>/dev/null || true; }  # no rank was started yet: the launcher itself
leave() { [ -z "${RANK_LOGS:-}" ] || echo "$1" >"$RANK_LOGS/code.$node"; exit "$1"; }
refuse() { echo "$here: $*" >&2; leave 2; }

count_gpus() {
  if command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU '
  elif command -v rocm-smi >/dev/null; then rocm-smi --showid 2>/dev/null | grep -o '^GPU\[[0-9]*\]' | sort -u | grep -c .
  fi; }

# A function, so that the shell has read all of it: a checkout may change while a run goes on.
main() {
  case ${1:-} in *.py) ;; *) set -- benchmark.py "$@";; esac

  local ranks nodes words code left
  ranks=${RANKS_PER_NODE:-${LOCAL_WORLD_SIZE:-${DGXNGPU:-${SLURM_GPUS_ON_NODE:-$(count_gpus)}}}}
  case ${ranks:=1} in 0) ranks=1;; *[!0-9]*) refuse "RANKS_PER_NODE is '$ranks'. Possible: a number of ranks.";; esac
  nodes=${NUM_NODES:-${SLURM_STEP_NUM_NODES:-1}}
  if [ -z "${NUM_NODES:-}" ] && [ -n "${WORLD_SIZE:-}" ]; then
    case $WORLD_SIZE in *[!0-9]*) nodes=0;; *) nodes=$((WORLD_SIZE % ranks ? 0 : WORLD_SIZE / ranks));; esac
    [ "$nodes" -gt 0 ] || refuse "WORLD_SIZE is '$WORLD_SIZE'. Possible: a multiple of the $ranks ranks of a node; or give NUM_NODES."
  fi

  command -v composer >/dev/null || refuse "no composer on the PATH. Activate the environment before sbatch, as docs/launching.md says."
  words=(--nproc "$ranks")
  if [ "$nodes" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] && [ -n "${MASTER_PORT:-}" ] ||
      refuse "MASTER_ADDR or MASTER_PORT is not given, and there are $nodes nodes. Give the name of the first, and a free port of it."
    words+=(--world_size $((nodes * ranks)) --node_rank "$node" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")
  fi
  if [ -n "${RANK_LOGS:-}" ]; then
    words+=(--stdout "$RANK_LOGS/rank{rank}.txt" --stderr "$RANK_LOGS/rank{rank}.txt")
    [ "$node" = 0 ] || exec >>"$RANK_LOGS/rank$((node * ranks)).txt" 2>&1
    echo "{\"at\": \"launcher\", \"unix_time\": $EPOCHREALTIME, \"node\": $node, \"start\": ${SLURM_RESTART_COUNT:-0}}" >>"$RANK_LOGS/times.jsonl"
  fi

  run_to_its_end composer "${words[@]}" "$@"
  code=$?
  # A launcher that was killed leaves its ranks, which would train on, and hold the GPUs. All are in the group of Slurm's task.
  if [ "$code" != 0 ] && [ -n "${SLURM_TASK_PID:-}" ] && command -v pgrep >/dev/null; then
    for left in $(pgrep -g "$SLURM_TASK_PID" || true); do
      case " $$ $PPID $SLURM_TASK_PID " in *" $left "*) ;; *) kill -KILL "$left" 2>/dev/null || true;; esac
    done
  fi
  leave "$code"
}

main "$@"
