#!/usr/bin/env bash
# The ranks of one node of a job: Composer's launcher, with the signals that the job gets passed on to its ranks.
#
#   launch/node.sh [-n 8] benchmark.py yamls/mlperf_256.yaml run_name=NAME key=value ...
#
# Nodes, ranks and address come from the variables that Composer's launcher reads itself: WORLD_SIZE, NODE_RANK, MASTER_ADDR,
# MASTER_PORT, LOCAL_WORLD_SIZE. The launcher has no handler: as the first process of a container it would ignore SIGTERM until
# the kill, elsewhere it would die at once and leave its ranks behind. Here the ranks hear SIGTERM and SIGUSR1, write a checkpoint
# at the next batch edge and end. Exit code: the launcher's; 143 and 138 say that the run was stopped so, 2 that it cannot run.
set -euo pipefail
cd "$(dirname "$0")/.."

pass_on() {
  pkill "-$1" -P "$launcher" || kill -TERM "$launcher" 2>/dev/null || true  # no rank was started yet: the launcher itself
}

trap 'pass_on TERM' TERM
trap 'pass_on USR1' USR1
composer "$@" &
launcher=$!

# A signal ends `wait`, not the launcher: wait again until it is gone, and then for its exit code.
while code=0; wait "$launcher" || code=$?; kill -0 "$launcher" 2>/dev/null; do :; done
exit "$code"
