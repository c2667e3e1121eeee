#!/usr/bin/env bash
# What it costs to trace every job: the upstairs as it is, beside one with the tracing compiled out, for 4 KiB random writes and reads at
# depth 32. Prints the median of the ratios of pairs.
#
# In a pair each has a volume and a load of its own, and the two loads run in turns of 0.2 s, so that what neighbours do to this machine
# hits both alike. From pair to pair they change volumes.
#
# usage: tools/trace-cost.sh [-b] [-n PAIRS] [-t SECONDS] [-o DIR]
#
#   -b  build both first, into target/trace-cost      -n  pairs of each job (7); with 0 they are only built
#   -t  for each load of a pair (4)                   -o  where each pair is kept (results/trace-cost); those of earlier runs
#                                                         count, so that a long measurement can be made in pieces
# Needs fio with its NBD engine, and jq.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

BUILD='' PAIRS=7 TIME=4 OUT=$ROOT/results/trace-cost SIZE=256M
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
UPS=() LOADS=()
cleanup() {
  local pid
  for pid in "${LOADS[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  volumes_stop
  rm -rf "$WORK"
}
trap cleanup EXIT

volumes_start() { # WAY WAY: of the first and the second volume
  local number
  UPS=() URIS=()
  for number in 1 2; do
    BIN=$BOTH/${!number}
    volume_start "$WORK/volume-$number" --size "$SIZE" --log warn
    UPS+=("$UP") URIS+=("$URI")
  done
}

volumes_start on on
for uri in "${URIS[@]}"; do
  fio --name=fill --ioengine=nbd "--uri=$uri" --thread --rw=write --bs=1m --iodepth=8 "--size=$SIZE" --end_fsync=1 >"$WORK/fill.out"
done
volumes_stop
for pair in $(seq "$PAIRS"); do
  ways=(off on)
  [ $((pair % 2)) = 0 ] || ways=(on off)
  volumes_start "${ways[@]}"
  for kind in write read; do
    loads_in_turns "$TIME" --rw="rand$kind" --bs=4k --iodepth=32 "--size=$SIZE"
    for number in 1 2; do jq ".jobs[0].$kind.total_ios" "$WORK/report-$number" >"$WORK/${ways[number - 1]}"; done
    printf '%s\t%s\n' "$(cat "$WORK/off")" "$(cat "$WORK/on")" >>"$OUT/$kind.tsv"
  done
  volumes_stop
done

printf '| 4 KiB random, depth 32 | pairs | without: I/Os | with: I/Os | ratios: median | least | most |\n|---|---|---|---|---|---|---|\n'
for kind in write read; do
  awk '{ print $2 / $1 }' "$OUT/$kind.tsv" | sort -n >"$WORK/ratios"
  printf '| %s | %d | %.0f | %.0f | %.3f | %.3f | %.3f |\n' "$kind" "$(wc -l <"$OUT/$kind.tsv")" "$(cut -f1 "$OUT/$kind.tsv" | median)" \
    "$(cut -f2 "$OUT/$kind.tsv" | median)" "$(median <"$WORK/ratios")" "$(head -1 "$WORK/ratios")" "$(tail -1 "$WORK/ratios")"
done
