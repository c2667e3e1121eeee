#!/usr/bin/env bash
# What a guest sees while one replica is stopped (SIGSTOP) or dead (SIGKILL): a steady load, the fault in its midst, and
# the throughput, the slowest I/O, the longest time without any completion, and the errors before, during and after.
#
# usage: tools/degraded.sh [-f stop|kill] [-n REPLICA] [-j write|read|mix] [-q DEPTH] [-r IOPS]
#                          [-w SECONDS] [-d SECONDS] [-a SECONDS] [-c LINE] [DIR]
#
#   DIR      of a running `newel up`; without it a volume of its own is made below target/ and removed again
#   -f       stop: SIGSTOP, and SIGCONT after -d seconds (default); kill: SIGKILL, `newel up` starts it again
#   -r       offered load (default: as fast as it goes)
#   -c       a line for the upstairs' configuration, without DIR: 'read_policy = "witness"'
#   -w -d -a seconds before the fault (3), during (5) and after (6)
# Needs fio with its NBD engine, and jq.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

FAULT=stop REPLICA=1 MODE=write DEPTH=16 RATE='' WARM=3 DURING=5 AFTER=6 LINE=''
while getopts 'f:n:j:q:r:w:d:a:c:h' option; do
  case $option in
    f) FAULT=$OPTARG ;; n) REPLICA=$OPTARG ;; j) MODE=$OPTARG ;; q) DEPTH=$OPTARG ;; r) RATE=$OPTARG ;;
    w) WARM=$OPTARG ;; d) DURING=$OPTARG ;; a) AFTER=$OPTARG ;; c) LINE=$OPTARG ;;
    *) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
need fio jq
case $MODE in
  write) load=(--rw=randwrite) ;; read) load=(--rw=randread) ;; mix) load=(--rw=randrw --rwmixread=70) ;;
  *) die "-j is write, read or mix" ;;
esac
case $FAULT in stop | kill) ;; *) die "-f is stop or kill" ;; esac
[ -z "$RATE" ] || load+=("--rate_iops=$RATE")

WORK=$(mktemp -d "$ROOT/target/degraded.XXXXXX")
UP='' STOPPED=''
cleanup() {
  [ -z "$STOPPED" ] || kill -CONT "$STOPPED" 2>/dev/null || true
  [ -z "$UP" ] || volume_stop "$UP"
  rm -rf "$WORK"
}
trap cleanup EXIT

if [ $# -gt 0 ]; then
  DIR=$(cd "$1" && pwd)
  address=$(sed -n 's/^listen = \["\([^"]*\)".*/\1/p' "$DIR/volume.toml")
  case $address in
    unix:*) URI="nbd+unix:///?socket=${address#unix:}" ;;
    tcp:*) URI="nbd://${address#tcp:}" ;;
    *) die "$DIR/volume.toml names no NBD address" ;;
  esac
else
  DIR=$WORK/volume
  echo "$LINE" >"$WORK/config"
  volume_start "$DIR" --size 1G --log warn --upstairs-config "$WORK/config"
  fio --name=fill --ioengine=nbd "--uri=$URI" --thread --rw=write --bs=1m --iodepth=8 --size=1g --end_fsync=1 >"$WORK/fill.out"
fi

total=$((WARM + DURING + AFTER))
# A target that hangs for good must not hang this script.
timeout $((total + 60)) fio --name=degraded --ioengine=nbd "--uri=$URI" --thread "${load[@]}" --bs=4k \
  --iodepth="$DEPTH" --size=1g --time_based --runtime="$total" --norandommap --randrepeat=0 --continue_on_error=all \
  --write_lat_log="$WORK/log" --log_avg_msec=0 --output-format=json --output="$WORK/report" >/dev/null 2>"$WORK/err" &
fio=$!
sleep "$WARM"
pid=$(volume_pid "$DIR" "downstairs-$REPLICA") || die "downstairs-$REPLICA doesn't run"
if [ "$FAULT" = kill ]; then
  kill -KILL "$pid"
else
  STOPPED=$pid
  kill -STOP "$pid"
  sleep "$DURING"
  kill -CONT "$pid"
  STOPPED=''
fi
rc=0
wait "$fio" || rc=$?

# Lines of the log: completion in ms, latency in ns, direction, …
sort -n -t, -k1,1 "$WORK"/log_lat.*.log | awk -F', *' -v warm="$WARM" -v during="$DURING" -v total="$total" '
  { part = $1 < warm * 1000 ? 0 : $1 < (warm + during) * 1000 ? 1 : 2
    count[part]++; if ($2 > slowest[part]) slowest[part] = $2
    if ($1 - last > gap[part]) gap[part] = $1 - last
    last = $1 }
  END {
    if (total * 1000 - last > gap[2]) gap[2] = total * 1000 - last
    name[0] = "before"; name[1] = "during"; name[2] = "after"
    seconds[0] = warm; seconds[1] = during; seconds[2] = total - warm - during
    print "|  | IOPS | slowest I/O, ms | longest gap, ms |"
    print "|---|---|---|---|"
    for (part = 0; part < 3; part++)
      printf "| %s | %d | %.1f | %d |\n", name[part], count[part] / seconds[part], slowest[part] / 1e6, gap[part] }'
echo "$MODE, depth $DEPTH, downstairs-$REPLICA: $FAULT; errors: $(report_of "$WORK/report" | jq '.jobs[0].total_err // 0'); fio exit code $rc"
exit "$rc"
