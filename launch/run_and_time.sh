#!/usr/bin/env bash
# One result of the MLPerf benchmark, with the variables that its submissions have: training, then scoring. On one machine:
#
#   source launch/config_DGXH100_01x08x32.sh
#   DATADIR=/data CHECKPOINTS=/weights NEMOLOGS=/runs SEED=7 launch/run_and_time.sh [key=value ...]
#
# With Slurm, once a node:
#
#   sbatch --nodes=$DGXNNODES --time=$WALLTIME --gpus-per-node=$DGXNGPU launch/slurm_container.sbatch launch/run_and_time.sh
#
# launch/mlperf.py says what the variables mean. It ends with the line RESULT,stable_diffusion,SECONDS,USER,BEGIN, and
# with the code of the first command that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
# shellcheck source=launch/waiting.sh
source launch/waiting.sh
first=$([ "${SLURM_NODEID:-0}" = 0 ] && echo yes)
pass_on() { kill "-$1" "$2" 2>/dev/null || true; }
say() { [ -z "$first" ] || echo "$@"; }

# A function, so that the shell has read all of it: a checkout may change while a run goes on.
main() {
  local words=() commands code=0
  mapfile -d '' -t commands < <(python -m launch.mlperf --null "$@")
  wait $! || { code=$?; [ -z "${RANK_LOGS:-}" ] || echo "$code" >"$RANK_LOGS/code.${SLURM_NODEID:-0}"; exit "$code"; }
  begin=$(date +%s)
  say "STARTING TIMING RUN AT $(date -d "@$begin" '+%F %r')"
  for word in "${commands[@]}"; do
    if [ -n "$word" ]; then words+=("$word"); continue; fi
    run_to_its_end bash launch/ranks.sh "${words[@]}" || exit $?
    words=()
  done
  end=$(date +%s)
  say "ENDING TIMING RUN AT $(date -d "@$end" '+%F %r')"
  say "RESULT,stable_diffusion,$((end - begin)),$(id -un),$(date -d "@$begin" '+%F %r')"
}

main "$@"
