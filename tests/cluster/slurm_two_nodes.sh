#!/usr/bin/env bash
# A real two-node Slurm cluster (munged + slurmctld + 2 x slurmd) on ONE machine, no systemd, no cgroups.
#
#   slurm_two_nodes.sh start DIR            bring it up (needs root; Debian: slurmctld slurmd slurm-client munge iproute2)
#   slurm_two_nodes.sh stop  DIR            cancel the jobs, stop what start recorded, delete the namespaces
#   slurm_two_nodes.sh exec  DIR WHERE CMD  run CMD in ctl | node1 | node2   (sbatch, sinfo, ... go to ctl)
#   slurm_two_nodes.sh fail   DIR node2     power loss: link down, then SIGKILL of everything in that namespace (netns only)
#   slurm_two_nodes.sh revive DIR node2     link up, slurmd again
#   slurm_two_nodes.sh net   DIR            only the namespaces (no Slurm): two bare "machines" for a launcher
#
# NET=netns (default): three network+UTS namespaces (ctl, node1, node2) joined by a bridge that lives inside ctl; the
#                      root namespace gets no interface, address, route or /etc/hosts line.
#                      /dev/shm is per node too, and so is TMPDIR.
# NET=loopback       : no namespaces; both slurmd on 127.0.0.1 with their own ports (no CAP_NET_ADMIN needed).
# CPUS=2  KILLWAIT=30  GPUS=0 (pretend GPUs per node)  CRED_EXPIRE=120 (s; a requeued job waits this long + 1)
# SLURMD_TIMEOUT=60 (s of silence until a node is down)   PORT=16817 (loopback: PORT, PORT+1, PORT+2)
set -euo pipefail
umask 022
usage() { sed -n '2,16p' "$0" | sed 's/^# \{0,1\}//'; exit 2; }
[ $# -ge 2 ] || usage
verb=$1; mkdir -p "$2"; D=$(cd "$2" && pwd -P); shift 2
# shellcheck source=/dev/null
[ -f "$D/env" ] && . "$D/env"                       # a running cluster keeps the settings it was started with
: "${NET:=netns}" "${CPUS:=2}" "${KILLWAIT:=30}" "${GPUS:=0}" "${CRED_EXPIRE:=120}" "${SLURMD_TIMEOUT:=60}" "${PORT:=16817}"
: "${TAG:=s$(printf %s "$D" | cksum | cut -d' ' -f1)}"   # per-DIR names: several clusters can live side by side
SUB=10.231.77
ip_of() { case $1 in ctl) echo $SUB.1;; node1) echo $SUB.11;; node2) echo $SUB.12;; esac; }
NODES="ctl node1 node2"

# --- processes: "pid starttime" per daemon, so that a recycled pid is never signalled -------------------------------
stime() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; s=${s##*) }; set -- $s; echo "${20}"; }
record() { echo "$2 $(stime "$2")" > "$D/run/$1.pid"; }
alive() { local p s; read -r p s < "$D/run/$1.pid" 2>/dev/null && [ "$(stime "$p" 2>/dev/null)" = "$s" ]; }
end() { # end NAME SECONDS
  local p s i; [ -f "$D/run/$1.pid" ] || return 0; read -r p s < "$D/run/$1.pid"
  if alive "$1"; then kill -TERM "$p" 2>/dev/null || true
    for ((i=0; i<$2*10; i++)); do alive "$1" || break; sleep 0.1; done
    if alive "$1"; then echo "$1 ($p) ignored SIGTERM for $2 s: SIGKILL" >&2; kill -KILL "$p" 2>/dev/null || true; fi
  fi; rm -f "$D/run/$1.pid"; }
spawn() { # spawn NAME WHERE CMD...: every link of the chain is an exec, so $! is the daemon itself
  local name=$1 where=$2; shift 2
  at "$where" setsid "$@" >>"$D/log/$name.out" 2>&1 </dev/null & record "$name" $!; }
at() { # at WHERE CMD...  (must exec, not fork: callers rely on the pid)
  local where=$1; shift
  if [ "$NET" = netns ]; then
    # the mount namespace that `ip netns exec` makes is private to this process tree: give each node its own /dev/shm
    exec ip netns exec "$TAG-$where" nsenter --uts="$D/run/uts.$where" env SLURM_CONF="$D/etc/slurm.conf" \
      sh -c 'mount --bind "$0" /dev/shm && exec "$@"' "$D/shm.$where" "$@"
  else exec env SLURM_CONF="$D/etc/slurm.conf" "$@"; fi; }
slurm() { (at ctl timeout 90 "$@"); }
ours() { # what is left of the jobs: netns: whatever still runs in the namespaces; loopback: job processes of this slurm.conf
  local p n keep=" " q=$$
  while [ "${q:-0}" -gt 1 ]; do keep="$keep$q "; q=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$q/status" 2>/dev/null); done   # never our callers
  if [ "$NET" = netns ]; then for n in $NODES; do ip netns pids "$TAG-$n" 2>/dev/null || true; done
  else for p in $(grep -lzxF "SLURM_CONF=$D/etc/slurm.conf" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3); do
    { grep -qz '^SLURM_JOB_ID=' "/proc/$p/environ" || grep -qx slurmstepd "/proc/$p/comm"; } 2>/dev/null && echo "$p" || true; done
  fi | sort -un | while read -r p; do case $keep in *" $p "*) ;; *) echo "$p";; esac; done; }

net_up() {
  [ "$NET" = netns ] || return 0
  local n
  for n in $NODES; do
    ip netns add "$TAG-$n"
    mkdir -p "/etc/netns/$TAG-$n"                   # `ip netns exec` binds these over /etc/* for that namespace only
    { echo "127.0.0.1 localhost"; for m in $NODES; do echo "$(ip_of "$m") $m"; done; } > "/etc/netns/$TAG-$n/hosts"
    mkdir -p "$D/shm.$n"; mount -t tmpfs -o mode=1777 "$TAG-shm" "$D/shm.$n"
    : > "$D/run/uts.$n"                             # a UTS namespace kept alive by a bind mount: its own `hostname`
    unshare --uts="$D/run/uts.$n" hostname "$n"
    ip -n "$TAG-$n" link set lo up
  done
  ip -n "$TAG-ctl" link add br0 type bridge
  ip -n "$TAG-ctl" addr add "$(ip_of ctl)/24" dev br0
  ip -n "$TAG-ctl" link set br0 up
  for n in node1 node2; do
    ip -n "$TAG-ctl" link add "v$n" type veth peer name eth0 netns "$TAG-$n"
    ip -n "$TAG-ctl" link set "v$n" master br0 up
    ip -n "$TAG-$n" addr add "$(ip_of $n)/24" dev eth0
    ip -n "$TAG-$n" link set eth0 up
  done; }
net_down() {
  [ "$NET" = netns ] || return 0
  local n; for n in node2 node1 ctl; do
    ip netns del "$TAG-$n" 2>/dev/null || true
    umount "$D/run/uts.$n" 2>/dev/null || true; rm -f "$D/run/uts.$n"
    umount "$D/shm.$n" 2>/dev/null || true; rmdir "$D/shm.$n" 2>/dev/null || true
    rm -rf "/etc/netns/$TAG-$n"
  done; rmdir /etc/netns 2>/dev/null || true; }

config() {
  local n addr ctladdr
  if [ "$NET" = netns ]; then ctladdr="ctl($(ip_of ctl))"; else ctladdr="$(hostname)(127.0.0.1)"; fi
  cat > "$D/etc/slurm.conf" <<E
ClusterName=$TAG
SlurmctldHost=$ctladdr
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$D/run/munge.sock,cred_expire=$CRED_EXPIRE
# nothing that needs cgroups, a database or an MPI
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
# everything under DIR; %n keeps the two slurmd apart
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool.%n
SlurmctldPidFile=$D/run/slurmctld.own.pid
SlurmdPidFile=$D/run/slurmd.%n.own.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
LogTimeFormat=iso8601_ms
# small machine: trust the file, not the probed hardware
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,bf_interval=5
ReturnToService=2
SlurmdTimeout=$SLURMD_TIMEOUT
InactiveLimit=0
# a signal that a busy node does not take in time is sent again a minute later, and would hit the same step of a restarted job
MessageTimeout=60
KillWait=$KILLWAIT
MinJobAge=86400
JobRequeue=1
TaskProlog=$D/etc/prolog.sh
E
  # a temporary folder per node: streaming's locks are there
  printf '#!/bin/sh\nmkdir -p %s/tmp.$SLURMD_NODENAME && echo export TMPDIR=%s/tmp.$SLURMD_NODENAME\n' "$D" "$D" > "$D/etc/prolog.sh"; chmod 755 "$D/etc/prolog.sh"
  # 22.05's slurmd initialises a cgroup plugin even when nothing uses it, and "autodetect" is fatal where /sys/fs/cgroup is
  # not mounted (`ip netns exec` mounts a fresh /sys; bare containers): name v1, which touches nothing until asked.
  printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' > "$D/etc/cgroup.conf"
  [ "$GPUS" -gt 0 ] && { echo "GresTypes=gpu"; } >> "$D/etc/slurm.conf"
  for n in 1 2; do
    if [ "$NET" = netns ]; then addr="NodeAddr=$(ip_of node$n) Port=$((PORT+1))"; else addr="NodeAddr=127.0.0.1 Port=$((PORT+n))"; fi
    echo "NodeName=node$n $addr CPUs=$CPUS State=UNKNOWN$([ "$GPUS" -gt 0 ] && echo " Gres=gpu:$GPUS" || true)" >> "$D/etc/slurm.conf"
    mkdir -p "$D/spool.node$n"
  done
  echo "PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO GraceTime=0" >> "$D/etc/slurm.conf"
  [ "$GPUS" -gt 0 ] && {
    # a Count without File is registered as 0 and drains the node (INVAL): give it harmless character devices (copies of /dev/null)
    mkdir -p "$D/dev"; for ((n=0; n<GPUS; n++)); do [ -e "$D/dev/gpu$n" ] || mknod "$D/dev/gpu$n" c 1 3; done
    if [ "$GPUS" = 1 ]; then echo "Name=gpu File=$D/dev/gpu0"; else echo "Name=gpu File=$D/dev/gpu[0-$((GPUS-1))]"; fi > "$D/etc/gres.conf"; } || true; }

case $verb in
net|start)
  [ "$(id -u)" = 0 ] || { echo "needs root" >&2; exit 1; }
  [ ! -f "$D/env" ] || { echo "$D is already up (stop it first)" >&2; exit 1; }
  for c in timeout setsid nsenter $([ "$NET" = netns ] && echo ip) $([ $verb = start ] && echo munged mungekey slurmctld slurmd sinfo); do
    command -v "$c" >/dev/null || { echo "missing: $c" >&2; exit 1; }; done
  mkdir -p "$D"/{etc,run,log,state}; chmod 755 "$D" "$D/run"
  # No `local`: what a half-failed start leaves is still named in env, so stop can clean it.
  printf '%s=%q\n' NET "$NET" CPUS "$CPUS" KILLWAIT "$KILLWAIT" GPUS "$GPUS" CRED_EXPIRE "$CRED_EXPIRE" SLURMD_TIMEOUT "$SLURMD_TIMEOUT" PORT "$PORT" TAG "$TAG" > "$D/env"
  # shellcheck disable=SC2154
  trap 'rc=$?; [ $rc = 0 ] || { echo "start failed ($rc); taking down what came up" >&2; "$0" stop "$D" >&2 || true; }' EXIT
  net_up
  if [ "$verb" = net ]; then echo "$TAG up: $NODES"; exit 0; fi
  config
  # --force: a test's folder is for its user alone, which munged would refuse
  [ -f "$D/etc/munge.key" ] || mungekey -c -k "$D/etc/munge.key"
  spawn munged ctl munged -F --force --key-file="$D/etc/munge.key" --socket="$D/run/munge.sock" --pid-file="$D/run/munged.own.pid" \
        --log-file="$D/log/munged.log" --seed-file="$D/run/munge.seed"
  for ((i=0; i<300; i++)); do [ -S "$D/run/munge.sock" ] && break; sleep 0.1; done
  munge -S "$D/run/munge.sock" -n </dev/null >/dev/null
  spawn slurmctld ctl slurmctld -D -i
  spawn slurmd.node1 node1 slurmd -D -N node1
  spawn slurmd.node2 node2 slurmd -D -N node2
  for ((i=0; i<600; i++)); do
    up=$(slurm sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l) || up=0
    [ "$up" = 2 ] && { slurm sinfo -N; exit 0; }
    for p in munged slurmctld slurmd.node1 slurmd.node2; do alive $p || { echo "$p died:" >&2; tail -5 "$D/log/$p.out" "$D/log/$p.log" >&2 2>/dev/null; exit 1; }; done
    sleep 0.2
  done; { echo "nodes not idle after 120 s; see $D/log"; slurm sinfo -N; slurm sinfo -R; } >&2; exit 1;;
fail|revive) [ "$NET" = netns ] || { echo "$verb needs NET=netns" >&2; exit 2; }; case ${1:-} in node1|node2) ;; *) usage;; esac;;&
fail)
  ip -n "$TAG-ctl" link set "v$1" down; for p in $(ip netns pids "$TAG-$1"); do kill -KILL "$p" 2>/dev/null || true; done; rm -f "$D/run/slurmd.$1.pid";;
revive) ip -n "$TAG-ctl" link set "v$1" up; spawn "slurmd.$1" "$1" slurmd -D -b -N "$1";;   # -b: "rebooted"; without it the lost step goes unnoticed
exec) where=$1; shift; [ -f "$D/env" ] || { echo "$D is not up" >&2; exit 1; }; at "$where" "$@";;
stop)
  [ -f "$D/env" ] || { echo "nothing recorded in $D"; exit 0; }
  if [ -f "$D/run/slurmctld.pid" ] && alive slurmctld; then            # slurmd does NOT take its steps down: cancel first
    slurm scancel --state=PENDING -u root 2>/dev/null || true; slurm scancel -u root 2>/dev/null || true
    for ((i=0; i<(KILLWAIT+10)*2; i++)); do [ -z "$(slurm squeue -h -o %i 2>/dev/null)" ] && break; sleep 0.5; done
  fi
  end slurmd.node2 10 & end slurmd.node1 10 & end slurmctld 15 & wait; end munged 5
  for sig in TERM KILL; do                                             # steps or tasks that outlived their slurmd
    left=$(ours); [ -n "$left" ] || break; echo "left over, SIG$sig: $(echo $left)" >&2
    for p in $left; do kill -$sig "$p" 2>/dev/null || true; done; for ((i=0; i<30; i++)); do [ -z "$(ours)" ] && break; sleep 0.1; done
  done
  net_down; rm -f "$D/run/munge.sock"* "$D/env"; echo "stopped $D";;
*) usage;;
esac
