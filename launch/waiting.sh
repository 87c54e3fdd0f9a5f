# shellcheck shell=bash
# Sourced by the scripts here.

# Run a command to its own end, and give its code, whatever signals come to this shell meanwhile. Slurm sends SIGTERM to every
# process of a job: the command has it too. SIGUSR1 is for the ranks alone: Composer's launcher would end of it at once, so it
# is ignored from here on, and benchmark.py takes it up again in each rank.
run_to_its_end() {
  local child code=0 again
  heard=
  trap 'heard=TERM' TERM
  trap '' USR1
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
