#!/usr/bin/env bash
# What the lead throttle costs with three equal replicas: an upstairs with it beside one without. Prints the median of the ratios of
# pairs, and for which part of the time any read was held back.
#
# In a pair each has a volume and a load of its own, and the two loads run in turns of 0.2 s, so that what neighbours do to this machine
# hits both alike. From pair to pair they change volumes.
#
# usage: tools/throttle-cost.sh [-n PAIRS] [-t SECONDS] [-f FAULTS] [-d DIR] [-o DIR]
#
#   -n  pairs of each job (7)         -t  for each load of a pair (4)
#   -f  what all replicas suffer alike, as in `newel fault`: jitter=1..10ms, or bandwidth=50M to leave CPU to spare
#   -d  where the volumes are made (/dev/shm). Three replicas on one disk are not equal: it serves them in turns
#   -o  where each pair is kept (results/throttle-cost); those of earlier runs count, so that a long measurement can be made in pieces
# Needs fio with its NBD engine, curl, and jq.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

PAIRS=7 TIME=4 OUT=$ROOT/results/throttle-cost SIZE=256M BASE=/dev/shm FAULTS=''
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
UPS=() LOADS=() WATCHER=''
cleanup() {
  local pid
  [ -z "$WATCHER" ] || kill "$WATCHER" 2>/dev/null || true
  for pid in "${LOADS[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  volumes_stop
  rm -rf "$WORK" "$STORE"
}
trap cleanup EXIT

volumes_start() { # ENABLED ENABLED: whether the first and the second volume throttle
  local number
  UPS=() URIS=()
  for number in 1 2; do
    printf '[throttle]\nenabled = %s\n' "${!number}" >"$WORK/config-$number"
    volume_start "$WORK/volume-$number" --size "$SIZE" --log warn --upstairs-config "$WORK/config-$number"
    UPS+=("$UP") URIS+=("$URI")
  done
}
suffer() { # on all replicas of both volumes what -f says
  local number replica
  [ -n "$FAULTS" ] || return 0
  for number in 1 2; do
    for replica in 0 1 2; do "$BIN/newel" fault --dir "$WORK/volume-$number" --replica "$replica" "$FAULTS" >/dev/null; done
  done
}

watch_volume() { # NUMBER: twenty looks a second
  while curl -sf -m 1 --unix-socket "$WORK/volume-$1/status.sock" http://newel/status; do
    echo
    sleep 0.05
  done
}

held() { # LOOKS: of all looks that found something under way, those at which a read was held back; the last one may be cut short
  sed '$d' "$1" | jq -rs 'map(select(any(.replicas[]; .queue_jobs > 0)))
    | [(map(select(.reads.waiting > 0 or any(.replicas[]; .read_delay_us > 0))) | length), length] | @tsv'
}

JOBS='4k:randread:32 1m:read:8'
for number in 1 2; do
  mkdir "$STORE/$number"
  ln -s "$STORE/$number" "$WORK/volume-$number"
done
volumes_start false false
for uri in "${URIS[@]}"; do
  fio --name=fill --ioengine=nbd "--uri=$uri" --thread --rw=write --bs=1m --iodepth=8 "--size=$SIZE" --end_fsync=1 >"$WORK/fill.out"
done
volumes_stop
for pair in $(seq "$PAIRS"); do
  ways=(false true)
  [ $((pair % 2)) = 0 ] || ways=(true false)
  volumes_start "${ways[@]}"
  suffer
  [ "${ways[0]}" = true ] && throttled=1 || throttled=2
  for job in $JOBS; do
    IFS=: read -r size kind depth <<<"$job"
    watch_volume "$throttled" >"$WORK/looks" &
    WATCHER=$!
    loads_in_turns "$TIME" "--rw=$kind" "--bs=$size" "--iodepth=$depth" "--size=$SIZE"
    kill "$WATCHER" && wait "$WATCHER" || true
    WATCHER=''
    for number in 1 2; do jq '.jobs[0].read.io_bytes' "$WORK/report-$number" >"$WORK/${ways[number - 1]}"; done
    printf '%s\t%s\t%s\n' "$(cat "$WORK/false")" "$(cat "$WORK/true")" "$(held "$WORK/looks")" >>"$OUT/$size.tsv"
  done
  volumes_stop
done

printf '| reads | pairs | without: MiB | with: MiB | ratios: median | least | most | held back |\n|---|---|---|---|---|---|---|---|\n'
for job in $JOBS; do
  IFS=: read -r size kind depth <<<"$job"
  file=$OUT/$size.tsv
  awk '{ print $2 / $1 }' "$file" | sort -n >"$WORK/ratios"
  printf '| %s %s, depth %d | %d | %.0f | %.0f | %.3f | %.3f | %.3f | %.2f%% of the time |\n' "$size" "$kind" "$depth" "$(wc -l <"$file")" \
    "$(cut -f1 "$file" | median | awk '{ print $1 / 1048576 }')" "$(cut -f2 "$file" | median | awk '{ print $1 / 1048576 }')" \
    "$(median <"$WORK/ratios")" "$(head -1 "$WORK/ratios")" "$(tail -1 "$WORK/ratios")" \
    "$(awk '{ held += $3; looks += $4 } END { print 100 * held / looks }' "$file")"
done
