#!/usr/bin/env bash
# What the lead throttle costs with three equal replicas: pairs of runs with and without it, on one volume. Prints the median of the
# pairs' ratios, and for which part of the time any read was held back.
#
# usage: tools/throttle-cost.sh [-n PAIRS] [-t SECONDS] [-f FAULTS] [-d DIR] [-o DIR]
#
#   -n  pairs of each job (7)         -t  for each run (2)
#   -f  what all three replicas suffer alike, as in `newel fault`: jitter=1..10ms, or bandwidth=50M to leave CPU to spare
#   -d  where the volume is made (/dev/shm). Three replicas on one disk are not equal: it serves them in turns
#   -o  where each pair is kept (results/throttle-cost); those of earlier runs count, so that a long measurement can be made in pieces
# Needs fio with its NBD engine, curl, and jq.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

PAIRS=7 TIME=2 OUT=$ROOT/results/throttle-cost SIZE=256M BASE=/dev/shm FAULTS=''
while getopts 'n:t:f:d:o:h' option; do
  case $option in
    n) PAIRS=$OPTARG ;; t) TIME=$OPTARG ;; f) FAULTS=$OPTARG ;; d) BASE=$OPTARG ;; o) OUT=$OPTARG ;;
    *) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
  esac
done
need fio curl jq
mkdir -p "$OUT"
WORK=$(mktemp -d "$ROOT/target/throttle-cost.XXXXXX")
STORE=$(mktemp -d "$BASE/newel-throttle-cost.XXXXXX")
ln -s "$STORE" "$WORK/volume"
UP='' WATCHER=''
cleanup() {
  [ -z "$WATCHER" ] || kill "$WATCHER" 2>/dev/null || true
  [ -z "$UP" ] || volume_stop "$UP"
  rm -rf "$WORK" "$STORE"
}
trap cleanup EXIT

watch_volume() { # twenty looks a second, with and without the throttle alike
  while curl -sf -m 1 --unix-socket "$WORK/volume/status.sock" http://newel/status; do
    echo
    sleep 0.05
  done
}

bytes_per_second() { # BS RW DEPTH LOOKS : of a run on the volume that is up
  watch_volume >"$4" &
  WATCHER=$!
  timeout $((TIME + 60)) fio --name=run --ioengine=nbd "--uri=$URI" --thread "--rw=$2" "--bs=$1" "--iodepth=$3" "--size=$SIZE" \
    --time_based "--runtime=$TIME" --ramp_time=0.5 --norandommap --randrepeat=0 --output-format=json --output="$WORK/report" \
    >/dev/null 2>"$WORK/err" || die "fio: $(cat "$WORK/err")"
  kill "$WATCHER" && wait "$WATCHER" || true
  WATCHER=''
  report_of "$WORK/report" | jq '.jobs[0].read.bw_bytes'
}

held() { # LOOKS : of all looks, those at which a read was held back; the last one may be cut short
  sed '$d' "$1" | jq -rs '[(map(select(.reads.waiting > 0 or any(.replicas[]; .read_delay_us > 0))) | length), length] | @tsv'
}

JOBS='4k:randread:32 1m:read:8'
volume_start "$WORK/volume" --size "$SIZE" --log warn
fio --name=fill --ioengine=nbd "--uri=$URI" --thread --rw=write --bs=1m --iodepth=8 "--size=$SIZE" --end_fsync=1 >"$WORK/fill.out"
volume_stop "$UP"
for pair in $(seq "$PAIRS"); do
  # Who comes first takes turns.
  order='false true'
  [ $((pair % 2)) = 0 ] || order='true false'
  for enabled in $order; do
    printf '[throttle]\nenabled = %s\n' "$enabled" >"$WORK/config"
    volume_start "$WORK/volume" --log warn --upstairs-config "$WORK/config"
    if [ -n "$FAULTS" ]; then
      for replica in 0 1 2; do "$BIN/newel" fault --dir "$WORK/volume" --replica "$replica" "$FAULTS" >/dev/null; done
    fi
    for job in $JOBS; do
      IFS=: read -r size kind depth <<<"$job"
      bytes_per_second "$size" "$kind" "$depth" "$WORK/looks.$size.$enabled" >"$WORK/rate.$size.$enabled"
    done
    volume_stop "$UP"
    UP=''
  done
  for job in $JOBS; do
    size=${job%%:*}
    printf '%s\t%s\t%s\n' "$(cat "$WORK/rate.$size.false")" "$(cat "$WORK/rate.$size.true")" "$(held "$WORK/looks.$size.true")" >>"$OUT/$size.tsv"
  done
done

median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
printf '| reads | pairs | without: MiB/s | with: MiB/s | median of the ratios | held back |\n|---|---|---|---|---|---|\n'
for job in $JOBS; do
  IFS=: read -r size kind depth <<<"$job"
  file=$OUT/$size.tsv
  printf '| %s %s, depth %d | %d | %.0f | %.0f | %.3f | %.2f%% of the time |\n' "$size" "$kind" "$depth" "$(wc -l <"$file")" \
    "$(cut -f1 "$file" | median | awk '{ print $1 / 1048576 }')" "$(cut -f2 "$file" | median | awk '{ print $1 / 1048576 }')" \
    "$(awk '{ print $2 / $1 }' "$file" | median)" "$(awk '{ held += $3; looks += $4 } END { print 100 * held / looks }' "$file")"
done
