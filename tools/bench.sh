#!/usr/bin/env bash
# Newel beside its nearest fair peer and the bare disk, all on one file system and in one run, as a markdown table.
#
# The peer is QEMU's quorum driver over three qemu-nbd replicas, each reading and writing its file with O_DIRECT and
# native aio, over unix sockets; all replicas are asked for every read and two must agree. Newel asks all replicas too.
# Both are filled alike, and the repetitions alternate between them, so that a neighbour's load hits both.
#
# usage: tools/bench.sh [-g | -m] [-r REPETITIONS] [-t SECONDS] [-j "JOB ..."] [-c LINE] [-p quorum|fifo] [-o DIR]
#
#   -g  only the jobs that Newel has goals for, and what was reached of each; three replicas on one disk can't write more than
#       a third of what it takes
#   -m  with the page cache on both sides: replicas of Newel run with cache = "page", those of the peer are nbdkit's file plugin
#       (needs nbdkit); random reads, and the goal for them
#   -r  of each job (5), the medians are printed     -t  for each run (3)
#   -j  of rw4k-q1 rw4k-q32 rr4k-q1 rr4k-q32 sw1m-q8 sr1m-q8 fs4k-q1 (all)
#   -c  a line for the upstairs' configuration: 'read_policy = "witness"'
#   -p  what the peer reads: of a quorum (quorum), or one replica alone, unchecked (fifo)
#   -o  where every fio report and results.tsv are kept (results/bench)
# Needs fio with its NBD engine, qemu-nbd and jq. Build first: cargo build --release.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

REPS=5 TIME=3 OUT=$ROOT/results/bench GOALS='' PAGE='' LINE='' PATTERN=quorum
JOBS='rw4k-q1 rw4k-q32 rr4k-q1 rr4k-q32 sw1m-q8 sr1m-q8 fs4k-q1'
while getopts 'gmr:t:j:c:p:o:h' option; do
  case $option in
    g) GOALS=1 JOBS='rw4k-q32 sw1m-q8 fs4k-q1' ;; m) PAGE=1 JOBS='rr4k-q32' ;;
    r) REPS=$OPTARG ;; t) TIME=$OPTARG ;; j) JOBS=$OPTARG ;; c) LINE=$OPTARG ;; p) PATTERN=$OPTARG ;; o) OUT=$OPTARG ;;
    *) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
  esac
done
case $PATTERN in quorum | fifo) ;; *) die "-p is quorum or fifo" ;; esac
need fio qemu-nbd jq
[ -z "$PAGE" ] || need nbdkit
mkdir -p "$OUT"
WORK=$(mktemp -d "$ROOT/target/bench.XXXXXX")
UP='' PEER_PIDS=()
cleanup() {
  [ -z "$UP" ] || volume_stop "$UP"
  [ ${#PEER_PIDS[@]} -eq 0 ] || kill "${PEER_PIDS[@]}" 2>/dev/null || true
  rm -rf "$WORK"
}
trap cleanup EXIT

# --- the targets --------------------------------------------------------------------------------
peer_start() {
  local replica options=driver=quorum,vote-threshold=2,read-pattern=$PATTERN
  for replica in 0 1 2; do
    fallocate -l 1G "$WORK/peer-$replica.img"
    if [ -n "$PAGE" ]; then
      exec setsid nbdkit -f -U "$WORK/peer-$replica.sock" -e r file "$WORK/peer-$replica.img"
    else
      exec setsid qemu-nbd -t -e 8 -k "$WORK/peer-$replica.sock" -x r -f raw --cache=none --aio=native --discard=unmap \
        "$WORK/peer-$replica.img"
    fi >"$WORK/peer-$replica.log" 2>&1 </dev/null &
    PEER_PIDS+=($!)
    await 10 "peer replica $replica" test -S "$WORK/peer-$replica.sock"
    options+=",children.$replica.driver=nbd,children.$replica.export=r"
    options+=",children.$replica.server.type=unix,children.$replica.server.path=$WORK/peer-$replica.sock"
  done
  setsid qemu-nbd -t -e 8 -k "$WORK/peer.sock" --cache=writeback --image-opts "$options" >"$WORK/peer.log" 2>&1 </dev/null &
  PEER_PIDS+=($!)
  await 10 'the peer' test -S "$WORK/peer.sock"
}

engine() { # TARGET -> fio arguments
  case $1 in
    newel) echo "--ioengine=nbd --uri=$NEWEL_URI" ;;
    peer) echo "--ioengine=nbd --uri=nbd+unix:///?socket=$WORK/peer.sock" ;;
    disk) echo "--ioengine=libaio --direct=1 --filename=$WORK/disk.img --fallocate=none" ;;
  esac
}

server_pids() { # TARGET
  case $1 in
    newel) jq '.[]' "$WORK/newel/pids.json" ;;
    peer) printf '%s\n' "${PEER_PIDS[@]}" ;;
  esac
}

job_args() { # JOB TARGET
  local sync=--fsync=1
  [ "$2" != disk ] || sync=--fdatasync=1
  case $1 in
    rw4k-q*) echo "--rw=randwrite --bs=4k --iodepth=${1#rw4k-q}" ;;
    rr4k-q*) echo "--rw=randread --bs=4k --iodepth=${1#rr4k-q}" ;;
    sw1m-q*) echo "--rw=write --bs=1m --iodepth=${1#sw1m-q}" ;;
    sr1m-q*) echo "--rw=read --bs=1m --iodepth=${1#sr1m-q}" ;;
    fs4k-q*) echo "--rw=randwrite --bs=4k --iodepth=${1#fs4k-q} $sync" ;;
    *) die "unknown job $1" ;;
  esac
}

# --- one run ------------------------------------------------------------------------------------
HZ=$(getconf CLK_TCK)
ticks() { # TARGET: user and system time of its servers
  local pid total=0 own
  for pid in $(server_pids "$1"); do
    own=$(sed 's/^.*) //' "/proc/$pid/stat" 2>/dev/null | awk '{print $12 + $13}') || own=0
    total=$((total + ${own:-0}))
  done
  echo "$total"
}

run_job() { # TARGET JOB REPETITION
  local report=$OUT/$1.$2.$3.json before after
  before=$(ticks "$1")
  # shellcheck disable=SC2046 # the arguments are words
  fio --name="$2" $(engine "$1") $(job_args "$2" "$1") --thread --size=1g --time_based --runtime="$TIME" \
    --randrepeat=0 --norandommap --percentile_list=50:99:99.9 --output-format=json --output="$report" \
    >/dev/null 2>"$WORK/err" || die "fio failed on $1 at $2: $(cat "$WORK/err")"
  after=$(ticks "$1")
  report_of "$report" | jq -r --arg target "$1" --arg job "$2" --argjson cpu $((after - before)) --argjson hz "$HZ" '
    .jobs[0] as $all | (if $all.read.total_ios > 0 then $all.read else $all.write end) as $io
    | [$target, $job, $io.iops, $io.bw_bytes / 1048576, $io.clat_ns.percentile["99.000000"] / 1000,
       $io.clat_ns.percentile["99.900000"] / 1000, $cpu * 1e6 / $hz / $io.total_ios] | @tsv' >>"$OUT/results.tsv"
}

fill() { # TARGET: what is read is written first
  # shellcheck disable=SC2046
  fio --name=fill $(engine "$1") --thread --rw=write --bs=1m --iodepth=8 --size=1g --end_fsync=1 >"$WORK/fill" 2>&1 ||
    die "cannot fill $1: $(cat "$WORK/fill")"
  # Into the page cache, if that is what is measured.
  # shellcheck disable=SC2046
  [ -z "$PAGE" ] || fio --name=warm $(engine "$1") --thread --rw=read --bs=128k --iodepth=8 --size=1g >"$WORK/fill" 2>&1 ||
    die "cannot read $1: $(cat "$WORK/fill")"
}

echo "$LINE" >"$WORK/upstairs.toml"
echo "cache = \"$([ -z "$PAGE" ] && echo none || echo page)\"" >"$WORK/downstairs.toml"
volume_start "$WORK/newel" --size 1G --prealloc full --no-restart --log warn --upstairs-config "$WORK/upstairs.toml" \
  --downstairs-config "$WORK/downstairs.toml"
NEWEL_URI=$URI
peer_start
fallocate -l 1G "$WORK/disk.img"
for target in newel peer disk; do fill "$target"; done

printf 'target\tjob\tiops\tmib_s\tp99_us\tp999_us\tserver_cpu_us\n' >"$OUT/results.tsv"
for repetition in $(seq "$REPS"); do
  for job in $JOBS; do
    if [ $((repetition % 2)) = 1 ]; then order='newel peer disk'; else order='peer newel disk'; fi
    for target in $order; do run_job "$target" "$job" "$repetition"; done
    echo "repetition $repetition of $REPS: $job done" >&2
  done
done

# --- the table ----------------------------------------------------------------------------------
median() { # TARGET JOB COLUMN
  awk -F'\t' -v t="$1" -v j="$2" -v c="$3" '$1 == t && $2 == j { print $c }' "$OUT/results.tsv" | sort -g |
    awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}
echo "| job | unit | Newel | QEMU quorum | ratio | disk | Newel to a third of it | p99.9, µs: Newel / quorum | server CPU per I/O, µs: Newel / quorum |"
echo "|---|---|---|---|---|---|---|---|---|"
for job in $JOBS; do
  case $job in *1m*) column=4 unit=MiB/s ;; *) column=3 unit=IOPS ;; esac
  awk -v job="$job" -v unit="$unit" -v n="$(median newel "$job" $column)" -v p="$(median peer "$job" $column)" \
    -v d="$(median disk "$job" $column)" -v nt="$(median newel "$job" 6)" -v pt="$(median peer "$job" 6)" \
    -v nc="$(median newel "$job" 7)" -v pc="$(median peer "$job" 7)" 'BEGIN {
      printf "| %s | %s | %d | %d | %.2f | %d | %.2f | %d / %d | %.0f / %.0f |\n",
        job, unit, n, p, n / p, d, 3 * n / d, nt, pt, nc, pc }'
done

goal() { # WHAT JOB at-least|at-most BOUND EXPRESSION: of n, p, d (throughput of each target) and cpu
  local column=3
  case $2 in *1m*) column=4 ;; esac
  awk -v what="$1" -v sense="$3" -v bound="$4" -v n="$(median newel "$2" $column)" \
    -v p="$(median peer "$2" $column)" -v d="$(median disk "$2" $column)" -v cpu="$(median newel "$2" 7)" "BEGIN {
      reached = $5; met = sense == \"at-least\" ? reached >= bound : reached <= bound
      sub(/-/, \" \", sense)
      printf \"| %s | %.2f | %s %s | %s |\\n\", what, reached, sense, bound, met ? \"yes\" : \"no\" }"
}
[ -z "$GOALS$PAGE" ] || printf '\n| goal | reached | asked for | met |\n|---|---|---|---|\n'
if [ -n "$GOALS" ]; then
  goal '4 KiB random write, depth 32, to a third of the disk' rw4k-q32 at-least 0.85 '3 * n / d'
  goal '4 KiB random write, depth 32, to QEMU quorum' rw4k-q32 at-least 1.4 'n / p'
  goal 'CPU of all servers for a 4 KiB write, depth 32, µs' rw4k-q32 at-most 80 cpu
  goal '1 MiB sequential write, depth 8, to a third of the disk' sw1m-q8 at-least 0.8 '3 * n / d'
  goal '4 KiB write and flush, depth 1, to QEMU quorum' fs4k-q1 at-least 1.6 'n / p'
fi
if [ -n "$PAGE" ]; then
  goal '4 KiB random read, depth 32, page cache, to QEMU quorum over nbdkit' rr4k-q32 at-least 1.3 'n / p'
fi
echo
echo "Medians of $REPS runs of $TIME s over 1 GiB; $(fio --version), $(qemu-nbd --version | head -1), $(uname -r), $(nproc) CPUs."
