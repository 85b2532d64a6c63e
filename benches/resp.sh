#!/usr/bin/env bash
# Measures the protocol of Redis, 64 commands at a time on 50 connections: `CL.THROTTLE` of Tollgate beside plain `INCR` of Redis,
# turn by turn on the same machine and over the same 10,000 keys. Prints requests a second, and the microseconds of processor
# time that the server itself used for each (user and system, from /proc).
#
#   cargo build --release -p tollgate-server && benches/resp.sh [rounds] [requests] [pipeline]
set -euo pipefail
cd "$(dirname "$0")/.."
rounds="${1:-5}" requests="${2:-1000000}" pipeline="${3:-64}"
tollgate="${TOLLGATE:-target/release/tollgate}"

said="$(mktemp)"
port=$((20000 + RANDOM % 10000))
redis-server --port "$port" --save "" --appendonly no >/dev/null &
redis=$!
"$tollgate" serve --listen 127.0.0.1:0 --resp 127.0.0.1:0 2>"$said" &
ours=$!
trap 'kill "$redis" "$ours" 2>/dev/null; rm -f "$said"' EXIT
until redis-cli -p "$port" ping >/dev/null 2>&1 && grep -q redis:// "$said"; do sleep 0.1; done
our_port="$(sed -n 's|.*redis://.*:||p' "$said")"

ticks() { awk '{ print $14 + $15 }' "/proc/$1/stat"; }
per_second="$(getconf CLK_TCK)"

# measure name pid port command…
measure() {
  local name=$1 pid=$2 port=$3 before after rate
  shift 3
  before="$(ticks "$pid")"
  rate="$(redis-benchmark -p "$port" -P "$pipeline" -c 50 -n "$requests" -r 10000 --csv "$@" 2>/dev/null | tail -1 |
    awk -F'","' '{ print $2 }')"
  after="$(ticks "$pid")"
  awk -v name="$name" -v rate="$rate" -v ticks=$((after - before)) -v hz="$per_second" -v n="$requests" \
    'BEGIN { printf "%-24s %10.0f req/s %8.3f us of CPU\n", name, rate, ticks * 1e6 / hz / n }'
}

for _ in $(seq "$rounds"); do
  measure "Redis INCR" "$redis" "$port" INCR key:__rand_int__
  measure "CL.THROTTLE, allowed" "$ours" "$our_port" CL.THROTTLE key:__rand_int__ 999999999 1000000 1
  measure "CL.THROTTLE, denied" "$ours" "$our_port" CL.THROTTLE no:__rand_int__ 0 1 1000000
done
