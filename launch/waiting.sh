# shellcheck shell=bash
# Sourced by the scripts that Slurm, a cloud or a person starts on a node.

[ -z "${SLURM_JOB_ID:-}" ] || trap '' USR1

# Run a command to its own end, and give its code, whatever signals come to this shell meanwhile.
#
# Slurm sends a signal to every process of a job: the command has it too. SIGUSR1 is for the ranks alone: Composer's launcher
# would end of it at once, so it is ignored above, and benchmark.py takes it up again in each rank.
# Elsewhere the signal comes to this shell alone, which hands it on by the function `pass_on SIGNAL PROCESS`, Ctrl-C as SIGTERM.
run_to_its_end() {
  local child code=0 again
  heard=
  if [ -n "${SLURM_JOB_ID:-}" ]; then
    trap 'heard=TERM' TERM
  else
    trap 'heard=TERM; pass_on TERM "$child"' TERM INT
    trap 'heard=USR1; pass_on USR1 "$child"' USR1
  fi
  "$@" &
  child=$!
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do code=0; wait "$child" || code=$?; done
  if [ -n "$heard" ]; then  # the last `wait` may have given the signal's code, not the command's
    again=0
    wait "$child" 2>/dev/null || again=$?
    [ "$again" = 127 ] || code=$again
  fi
  return "$code"
}
