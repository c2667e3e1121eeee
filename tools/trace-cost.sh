#!/usr/bin/env bash
# What it costs to trace every job: the upstairs as it is, beside one with the tracing compiled out, in pairs of runs on one volume. Prints
# the median of the pairs' ratios for 4 KiB random writes and reads at depth 32.
#
# usage: tools/trace-cost.sh [-b] [-n PAIRS] [-t SECONDS] [-o DIR]
#
#   -b  build both first, into target/trace-cost      -n  pairs of each job (7); with 0 they are only built
#   -t  for each run (3)                              -o  where each pair is kept (results/trace-cost); those of earlier runs
#                                                         count, so that a long measurement can be made in pieces
# Needs fio with its NBD engine, and jq.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

BUILD='' PAIRS=7 TIME=3 OUT=$ROOT/results/trace-cost SIZE=256M
while getopts 'bn:t:o:h' option; do
  case $option in
    b) BUILD=1 ;; n) PAIRS=$OPTARG ;; t) TIME=$OPTARG ;; o) OUT=$OPTARG ;;
    *) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
  esac
done
need fio jq
BOTH=$ROOT/target/trace-cost

if [ -n "$BUILD" ]; then
  mkdir -p "$BOTH/off" "$BOTH/on"
  (cd "$ROOT" && cargo build --release -p newel-tools -p newel-downstairs &&
    cargo build --release -p newel-upstairs --no-default-features --features daemon)
  cp "$ROOT"/target/release/newel{,-upstairs,-downstairs} "$BOTH/off/"
  (cd "$ROOT" && cargo build --release -p newel-upstairs)
  cp "$ROOT"/target/release/newel{,-upstairs,-downstairs} "$BOTH/on/"
fi
for way in off on; do
  [ -x "$BOTH/$way/newel-upstairs" ] || die "$BOTH/$way/newel-upstairs is missing: run with -b first"
done
[ "$PAIRS" -gt 0 ] || exit 0
mkdir -p "$OUT"
WORK=$(mktemp -d "$ROOT/target/trace-cost.XXXXXX")
UP=''
cleanup() {
  [ -z "$UP" ] || volume_stop "$UP"
  rm -rf "$WORK"
}
trap cleanup EXIT

iops() { # KIND : of a run on the volume that is up
  timeout $((TIME + 60)) fio --name=run --ioengine=nbd "--uri=$URI" --thread --rw="rand$1" --bs=4k --iodepth=32 "--size=$SIZE" \
    --time_based "--runtime=$TIME" --ramp_time=0.5 --norandommap --randrepeat=0 --output-format=json --output="$WORK/report" \
    >/dev/null 2>"$WORK/err" || die "fio: $(cat "$WORK/err")"
  report_of "$WORK/report" | jq ".jobs[0].$1.iops"
}

BIN=$BOTH/on
volume_start "$WORK/volume" --size "$SIZE" --log warn
fio --name=fill --ioengine=nbd "--uri=$URI" --thread --rw=write --bs=1m --iodepth=8 "--size=$SIZE" --end_fsync=1 >"$WORK/fill.out"
volume_stop "$UP"
for pair in $(seq "$PAIRS"); do
  # Who comes first takes turns.
  order='off on'
  [ $((pair % 2)) = 0 ] || order='on off'
  for way in $order; do
    BIN=$BOTH/$way
    volume_start "$WORK/volume" --log warn
    for kind in write read; do iops "$kind" >"$WORK/$kind.$way"; done
    volume_stop "$UP"
    UP=''
  done
  for kind in write read; do
    printf '%s\t%s\n' "$(cat "$WORK/$kind.off")" "$(cat "$WORK/$kind.on")" >>"$OUT/$kind.tsv"
  done
done

median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
printf '| 4 KiB random, depth 32 | pairs | without: IOPS | with: IOPS | median of the ratios |\n|---|---|---|---|---|\n'
for kind in write read; do
  printf '| %s | %d | %.0f | %.0f | %.3f |\n' "$kind" "$(wc -l <"$OUT/$kind.tsv")" "$(cut -f1 "$OUT/$kind.tsv" | median)" \
    "$(cut -f2 "$OUT/$kind.tsv" | median)" "$(awk '{ print $2 / $1 }' "$OUT/$kind.tsv" | median)"
done
