#!/usr/bin/env bash
# One replica slower than the others, with the throttle and without: what its queue comes to in milliseconds of its own rate, by how much
# the fastest is ahead, what the guest gets, and for which part of the time reads are held back. The first second of reads is left out.
#
# usage: tools/throttle.sh [-f FAULTS] [-j "JOB ..."] [-t SECONDS] [-c LINE] [-d DIR] [-n]
#
#   -f  what one replica suffers (bandwidth=20M), as in `newel fault`
#   -j  jobs of fio: SIZE:KIND:DEPTH ("4k:randread:32")
#   -t  for each run, beyond the first second (4)      -n  not without the throttle
#   -c  a line for the upstairs' configuration: 'cancel_reads = true'
#   -d  where the volume is made (target). In /dev/shm there is no disk to share
# Needs fio with its NBD engine, curl, and jq.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

FAULTS=bandwidth=20M JOBS=4k:randread:32 TIME=4 LINE='' BASE=$ROOT/target SIZE=256M WAYS='true false'
while getopts 'f:j:t:c:d:nh' option; do
  case $option in
    f) FAULTS=$OPTARG ;; j) JOBS=$OPTARG ;; t) TIME=$OPTARG ;; c) LINE=$OPTARG ;; d) BASE=$OPTARG ;; n) WAYS=true ;;
    *) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
  esac
done
need fio curl jq
WORK=$(mktemp -d "$ROOT/target/throttle.XXXXXX")
STORE=$(mktemp -d "$BASE/newel-throttle.XXXXXX")
ln -s "$STORE" "$WORK/volume"
UP='' WATCHER=''
cleanup() {
  [ -z "$WATCHER" ] || kill "$WATCHER" 2>/dev/null || true
  [ -z "$UP" ] || volume_stop "$UP"
  rm -rf "$WORK" "$STORE"
}
trap cleanup EXIT

watch_volume() { # twenty looks a second
  local status
  while status=$(curl -sf -m 1 --unix-socket "$WORK/volume/status.sock" http://newel/status); do
    printf '{"at":%s,"status":%s}\n' "$EPOCHREALTIME" "$status"
    sleep 0.05
  done
}

figures() { # LOOKS REPORT : a line of the table
  report_of "$2" | jq '.jobs[0].read.iops' >"$WORK/iops"
  sed '$d' "$1" | jq -rs --argjson guest "$(cat "$WORK/iops")" '
    (map(select(any(.status.replicas[]; .queue_jobs > 0))) | first.at) as $began
    | map(select(.at > $began + 1)) as $looks
    | (($looks[-1].status.replicas[2].work.reads - $looks[0].status.replicas[2].work.reads) / ($looks[-1].at - $looks[0].at)) as $rate
    | def ms: . / 1000 * 10 | round / 10;
      ($looks | map(.status.replicas[2].queue_jobs / $rate * 1e6) | sort) as $queue
    | ($looks | map(.status.replicas | map(.read_lead_us // 0) | max) | sort) as $lead
    | ($looks | map(select(.status.reads.waiting > 0 or any(.status.replicas[]; .read_delay_us > 0))) | length) as $held
    | " \($guest | round) | \($rate | round) | \($guest / $rate * 1000 | round / 1000) | \($queue[($queue | length) / 2 | floor] | ms) | \($queue[-1] | ms)"
      + " | \($lead[0] | ms) to \($lead[-1] | ms) | \($held * 1000 / ($looks | length) | round / 10)% |"'
}

volume_start "$WORK/volume" --size "$SIZE" --log warn
fio --name=fill --ioengine=nbd "--uri=$URI" --thread --rw=write --bs=1m --iodepth=8 "--size=$SIZE" --end_fsync=1 >"$WORK/fill.out"
volume_stop "$UP"
echo "| reads, one replica with $FAULTS | guest: reads/s | that replica: reads/s | ratio | its queue: ms, median | most | lead of the fastest, ms | held back |"
echo '|---|---|---|---|---|---|---|---|'
for job in $JOBS; do
  IFS=: read -r size kind depth <<<"$job"
  for enabled in $WAYS; do
    printf '%s\n[throttle]\nenabled = %s\n' "$LINE" "$enabled" >"$WORK/config"
    volume_start "$WORK/volume" --log warn --upstairs-config "$WORK/config"
    "$BIN/newel" fault --dir "$WORK/volume" --replica 2 "$FAULTS" >/dev/null
    timeout $((TIME + 60)) fio --name=run --ioengine=nbd "--uri=$URI" --thread "--rw=$kind" "--bs=$size" "--iodepth=$depth" \
      "--size=$SIZE" --time_based "--runtime=$TIME" --ramp_time=1 --norandommap --randrepeat=0 --output-format=json \
      --output="$WORK/report" >/dev/null 2>"$WORK/err" &
    load=$!
    watch_volume >"$WORK/looks" &
    WATCHER=$!
    wait "$load" || die "fio: $(cat "$WORK/err")"
    kill "$WATCHER" && wait "$WATCHER" || true
    WATCHER=''
    volume_stop "$UP"
    UP=''
    way=with
    [ "$enabled" = true ] || way=without
    printf '| %s %s, depth %d, %s the throttle |%s\n' "$size" "$kind" "$depth" "$way" "$(figures "$WORK/looks" "$WORK/report")"
  done
done
