#!/usr/bin/env bash
# One-node OpenStack Swift with its S3 API, on loopback: a real object store to test against.
# usage: s3-server.sh start DIR [PORT]  |  s3-server.sh stop DIR
set -euo pipefail
python=${SWIFT_PYTHON:-/usr/bin/python3}  # the interpreter that has swift
cmd=${1:?start or stop} dir=${2:?a folder for its data} port=${3:-8333}
case $cmd in
start)
  mkdir -p "$dir"/{etc,srv/d1,run,cache,log}
  dir=$(cd "$dir" && pwd)
  cd "$dir/etc"
  cat > swift.conf <<C
[swift-hash]
swift_hash_path_prefix = tensorizer
swift_hash_path_suffix = tensorizer
[storage-policy:0]
name = default
default = yes
C
  obj=$((port+1)) con=$((port+2)) acc=$((port+3))
  # One process in place of nine calls of swift-ring-builder.
  [ -f account.ring.gz ] || "$python" - object:$obj container:$con account:$acc <<'P'
import sys
from swift.common.ring import RingBuilder
for pair in sys.argv[1:]:
    kind, port = pair.split(":")
    builder = RingBuilder(4, 1, 1)
    place = {"ip": "127.0.0.1", "port": int(port), "replication_ip": "127.0.0.1", "replication_port": int(port)}
    builder.add_dev({"id": 0, "region": 1, "zone": 1, "device": "d1", "weight": 1, "meta": "", **place})
    builder.rebalance()
    builder.get_ring().save(kind + ".ring.gz")
P
  for pair in object:$obj container:$con account:$acc; do
    kind=${pair%%:*} p=${pair##*:}
    cat > $kind-server.conf <<C
[DEFAULT]
swift_dir = $dir/etc
devices = $dir/srv
mount_check = false
bind_ip = 127.0.0.1
bind_port = $p
workers = 1
user = $(id -un)
log_level = WARNING
[pipeline:main]
pipeline = $kind-server
[app:$kind-server]
use = egg:swift#$kind
C
  done
  cat > proxy-server.conf <<C
[DEFAULT]
swift_dir = $dir/etc
bind_ip = 127.0.0.1
bind_port = $port
workers = 1
user = $(id -un)
log_level = WARNING
[pipeline:main]
pipeline = catch_errors proxy-logging cache listing_formats s3api tempauth copy slo dlo versioned_writes proxy-logging proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:$((port+4))
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
check_bucket_owner = false
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:versioned_writes]
use = egg:swift#versioned_writes
C
  memcached -u root -l 127.0.0.1 -p $((port+4)) -m 64 -d -P "$dir/run/memcached.pid"
  for kind in object container account; do
    SWIFT_DIR=$dir/etc setsid nohup swift-$kind-server "$dir/etc/$kind-server.conf" >"$dir/log/$kind.log" 2>&1 & echo $! > "$dir/run/$kind.pid"
  done
  setsid nohup swift-proxy-server "$dir/etc/proxy-server.conf" >"$dir/log/proxy.log" 2>&1 & echo $! > "$dir/run/proxy.pid"
  for _ in $(seq 1200); do curl -sf -o /dev/null "http://127.0.0.1:$port/info" && break; sleep 0.1; done
  for f in "$dir"/run/*.pid; do kill -0 "$(cat "$f")" || { echo "$f: has ended, see $dir/log" >&2; exit 1; }; done
  echo "http://127.0.0.1:$port test:tester testing"
  ;;
stop)
  for f in "$dir"/run/*.pid; do kill "$(cat "$f")" 2>/dev/null || true; rm -f "$f"; done ;;
esac
