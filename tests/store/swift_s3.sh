#!/bin/bash
# A throw-away OpenStack Swift with its S3 API on 127.0.0.1, for integration tests.
#
#   swift_s3.sh start DIR PORT   bring it up (state in DIR, S3 endpoint on 127.0.0.1:PORT)
#   swift_s3.sh stop  DIR        stop only what start started (data in DIR stays)
#   swift_s3.sh status DIR       exit 0 when every daemon is alive
#   swift_s3.sh guard DIR        wait for the end of stdin, then stop and remove DIR: for a caller that may be killed
#
# Ports used, all on 127.0.0.1: PORT proxy/S3, +1 account, +2 container, +3 object, +4 memcached.
# Credentials: SWIFT_S3_KEY_ID (default test:tester; must be account:user), SWIFT_S3_SECRET
# (default testing).  A second user, ACCOUNT:guest with the same secret, is known and may do nothing.
# Region: us-east-1.  Debian: swift-proxy swift-account swift-container
# swift-object memcached.  No systemd, no loop mount, no rsync, no change to /etc.
set -u
PY=/usr/bin/python3            # the distribution's python: that is where swift is importable
SERVERS="account container object proxy"
die() { echo "swift_s3: $*" >&2; exit 1; }

mine() { # mine NAME -> prints the pid when DIR/run/NAME.pid names a live process that start made
    local pid
    pid=$(cat "$DIR/run/$1.pid" 2>/dev/null) || return 1
    [[ $pid =~ ^[0-9]+$ ]] || return 1
    # guards against pid reuse: the command line has to name a file of this very DIR
    tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF -e "$DIR/etc/$1-server.conf" \
        -e "$DIR/run/$1.pid" || return 1
    [[ $(ps -o stat= -p "$pid" 2>/dev/null) == Z* ]] && return 1
    echo "$pid"
}

listening() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

healthy() { # healthy PORT -> the healthcheck middleware answers OK
    timeout 2 bash -c 'exec 3<>/dev/tcp/127.0.0.1/$0 || exit 1
        printf "GET /healthcheck HTTP/1.0\r\nHost: localhost\r\n\r\n" >&3
        grep -q "200 OK" <&3' "$1" 2>/dev/null
}

write_configs() {
    local user acct usr n=0 s
    user=$(id -un)
    acct=${KEY_ID%%:*}; usr=${KEY_ID#*:}
    [[ $KEY_ID == *:* && $KEY_ID =~ ^[A-Za-z0-9:]+$ ]] || die "SWIFT_S3_KEY_ID must be account:user"
    cat >"$DIR/etc/swift.conf" <<E
[swift-hash]
swift_hash_path_prefix = loopback
swift_hash_path_suffix = test
[storage-policy:0]
name = Policy-0
default = yes
[swift-constraints]
max_meta_overall_size = 2048
E
    for s in account container object; do
        n=$((n + 1))
        cat >"$DIR/etc/$s-server.conf" <<E
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $((PORT + n))
bind_timeout = 5
workers = 0
user = $user
swift_dir = $DIR/etc
devices = $DIR/srv
mount_check = false
db_preallocation = off
fallocate_reserve = 0
log_level = INFO
[pipeline:main]
pipeline = healthcheck $s-server
[app:$s-server]
use = egg:swift#$s
container_update_timeout = 30
[filter:healthcheck]
use = egg:swift#healthcheck
E
    done
    cat >"$DIR/etc/proxy-server.conf" <<E
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $PORT
bind_timeout = 5
workers = 0
user = $user
swift_dir = $DIR/etc
log_level = INFO
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck proxy-logging cache listing_formats s3api tempauth bulk copy slo dlo versioned_writes symlink proxy-logging proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
conn_timeout = 5
node_timeout = 60
error_suppression_interval = 0
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
s3_acl = false
[filter:tempauth]
use = egg:swift#tempauth
user_${acct}_${usr} = $SECRET .admin
user_${acct}_guest = $SECRET
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:$((PORT + 4))
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
E
    for s in catch_errors gatekeeper healthcheck proxy_logging:proxy-logging listing_formats \
             bulk copy slo dlo symlink; do
        printf '[filter:%s]\nuse = egg:swift#%s\n' "${s#*:}" "${s%%:*}"
    done >>"$DIR/etc/proxy-server.conf"
}

make_rings() { # one process for the three rings; deterministic, so safe to repeat on every start
    (cd / && "$PY" -I - "$DIR/etc" "$PORT" <<'E'
import sys
from swift.common.ring import RingBuilder
etc, port = sys.argv[1], int(sys.argv[2])
for n, name in enumerate(('account', 'container', 'object'), 1):
    b = RingBuilder(2, 1, 0)                      # 4 partitions, 1 replica, no min_part_hours
    b.add_dev({'region': 1, 'zone': 1, 'ip': '127.0.0.1', 'port': port + n, 'device': 'd1',
               'weight': 1.0, 'meta': '', 'replication_ip': '127.0.0.1',
               'replication_port': port + n})
    b.rebalance(seed='1')
    b.get_ring().save('%s/%s.ring.gz' % (etc, name))
E
    ) || die "ring building failed"
}

# swift hard-codes /etc/swift/swift.conf; point it at DIR before its modules read it, note the
# pid, then run the packaged entry script unchanged.
LAUNCH='import sys, os, runpy
conf, pidfile, script, server_conf = sys.argv[1:5]
import swift.common.utils as u
u.SWIFT_CONF_FILE = conf
open(pidfile, "w").write("%d\n" % os.getpid())
sys.argv = [script, server_conf, "-v"]
runpy.run_path(script, run_name="__main__")'

launch_all() {
    local s n=0
    if ! mine memcached >/dev/null; then
        rm -f "$DIR/run/memcached.pid"
        setsid memcached -l 127.0.0.1 -p $((PORT + 4)) -U 0 -m 64 -u "$(id -un)" \
            -P "$DIR/run/memcached.pid" </dev/null >>"$DIR/log/memcached.log" 2>&1 9>&- &
    fi
    for s in $SERVERS; do
        mine "$s" >/dev/null && continue
        rm -f "$DIR/run/$s.pid"
        setsid "$PY" -I -c "$LAUNCH" "$DIR/etc/swift.conf" "$DIR/run/$s.pid" \
            "/usr/bin/swift-$s-server" "$DIR/etc/$s-server.conf" \
            </dev/null >>"$DIR/log/$s.log" 2>&1 9>&- &
    done
}

stop_all() {
    local s pid pids=""
    for s in proxy object container account memcached; do
        pid=$(mine "$s") && { kill "$pid" 2>/dev/null; pids="$pids $s:$pid"; }
    done
    for _ in $(seq 50); do
        local left=""
        for s in $pids; do mine "${s%%:*}" >/dev/null && left="$left $s"; done
        [[ -z $left ]] && break
        sleep 0.1
    done
    for s in ${left:-}; do mine "${s%%:*}" >/dev/null && kill -9 "${s#*:}" 2>/dev/null; done
    rm -f "$DIR"/run/*.pid
}

cmd=${1:-}; [[ $# -ge 2 ]] || die "usage: $0 start DIR PORT | stop DIR | status DIR | guard DIR"
case $cmd in start|stop|status|guard) ;; *) die "unknown command $cmd";; esac
if [[ $cmd == guard ]]; then
    trap '' TERM INT HUP                          # only the end of stdin ends it, however the caller ended
    cat >/dev/null
    for s in proxy object container account memcached; do   # a frozen one would not see TERM
        DIR=$(realpath "$2"); pid=$(mine "$s") && kill -CONT "$pid" 2>/dev/null
    done
    "$0" stop "$2"; rm -rf -- "$2"
    exit 0
fi
[[ $cmd == start ]] && mkdir -p "$2"
[[ -d $2 ]] || { [[ $cmd == stop ]] && exit 0; die "$2: no such directory"; }
DIR=$(realpath "$2")
mkdir -p "$DIR"/{etc,run,log,srv/d1} || die "cannot write $DIR"
chmod 700 "$DIR"
exec 9>"$DIR/run/lock"; flock -w 60 9 || die "another start/stop is at work on $DIR"

case $cmd in
start)
    PORT=${3:?PORT}; [[ $PORT =~ ^[0-9]+$ ]] || die "bad port $PORT"
    KEY_ID=${SWIFT_S3_KEY_ID:-test:tester}; SECRET=${SWIFT_S3_SECRET:-testing}
    want="$PORT $KEY_ID $SECRET"
    alive=0; for s in $SERVERS memcached; do mine "$s" >/dev/null && alive=$((alive + 1)); done
    if [[ $alive == 5 && $(cat "$DIR/run/want" 2>/dev/null) == "$want" ]] && healthy "$PORT"; then
        echo "http://127.0.0.1:$PORT"; exit 0                       # already up
    fi
    [[ $alive == 0 ]] || stop_all                                   # half up, or other settings
    for n in 0 1 2 3 4; do
        listening $((PORT + n)) && die "port $((PORT + n)) is taken by somebody else"
    done
    for s in "$PY" /usr/bin/swift-proxy-server /usr/bin/swift-object-server; do
        [[ -e $s ]] || die "$s is missing (apt install swift-proxy swift-account swift-container swift-object memcached)"
    done
    "$PY" -I -c 'import os,sys; f=sys.argv[1]; open(f,"w").close(); os.setxattr(f,"user.t",b"x"*3000); os.unlink(f)' \
        "$DIR/srv/d1/.xattr" || die "no user xattrs (3000 bytes) under $DIR; choose another disk, or /dev/shm"
    write_configs; make_rings
    echo "$want" >"$DIR/run/want"
    launch_all
    for _ in $(seq 150); do                                         # at most about 30 s
        ok=0
        for n in 0 1 2 3; do healthy $((PORT + n)) && ok=$((ok + 1)); done
        [[ $ok == 4 ]] && listening $((PORT + 4)) && mine memcached >/dev/null &&
            mine proxy >/dev/null && { echo "http://127.0.0.1:$PORT"; exit 0; }
        sleep 0.2
    done
    tail -n 5 "$DIR"/log/*.log >&2; stop_all; die "did not come up in time"
    ;;
stop) stop_all ;;
status)
    rc=0
    for s in $SERVERS memcached; do
        pid=$(mine "$s") && echo "$s $pid" || { echo "$s down"; rc=1; }
    done
    exit $rc ;;
esac
