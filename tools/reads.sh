#!/usr/bin/env bash
# What each way to read costs and what a slow replica does to it: fan-out with and without the throttle, fan-out with
# cancelled reads, and witnessed reads; first with equal replicas, then with one at fault. All in one run, in turns; medians.
#
# usage: tools/reads.sh [-n REPETITIONS] [-t SECONDS] [-f FAULTS] [-z SIZE] [-w "WAY ..."]
#
#   -w       of off fanout cancel witness (all); off is fan-out without the throttle
#   -f       what one replica suffers (default read-delay=20ms), as in `newel fault`
# Needs fio with its NBD engine, and jq.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

REPETITIONS=3 RUNTIME=2 FAULTS=read-delay=20ms SIZE=256M WAYS='off fanout cancel witness'
while getopts 'n:t:f:z:w:h' option; do
  case $option in
    n) REPETITIONS=$OPTARG ;; t) RUNTIME=$OPTARG ;; f) FAULTS=$OPTARG ;; z) SIZE=$OPTARG ;; w) WAYS=$OPTARG ;;
    *) sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
  esac
done
need fio jq

WORK=$(mktemp -d "$ROOT/target/reads.XXXXXX")
UP=''
cleanup() {
  [ -z "$UP" ] || volume_stop "$UP"
  rm -rf "$WORK"
}
trap cleanup EXIT

read_volume() { # FIO-ARGUMENT... : bytes per second
  timeout $((RUNTIME + 60)) fio --name=read --ioengine=nbd "--uri=$URI" --thread "--size=$SIZE" --time_based \
    --norandommap --randrepeat=0 "$@" --output-format=json --output="$WORK/report" >/dev/null 2>"$WORK/err"
  report_of "$WORK/report" | jq '.jobs[0].read.bw_bytes'
}

config() { # WAY
  case $1 in
    off) printf '[throttle]\nenabled = false\n' ;;
    fanout) ;;
    cancel) printf 'cancel_reads = true\n' ;;
    witness) printf 'read_policy = "witness"\n' ;;
  esac
}

volume_start "$WORK/volume" --size "$SIZE" --log warn
fio --name=fill --ioengine=nbd "--uri=$URI" --thread --rw=write --bs=1m --iodepth=8 "--size=$SIZE" --end_fsync=1 \
  >"$WORK/fill.out"
volume_stop "$UP"
for _ in $(seq "$REPETITIONS"); do
  for way in $WAYS; do
    config "$way" >"$WORK/config"
    volume_start "$WORK/volume" --log warn --upstairs-config "$WORK/config"
    for state in equal faulty; do
      [ "$state" = equal ] || "$BIN/newel" fault --dir "$WORK/volume" --replica 2 "$FAULTS" >/dev/null
      # The first second is left out: a throttle settles in it.
      for job in 4k:randread:32 1m:read:8; do
        IFS=: read -r size kind depth <<<"$job"
        read_volume "--rw=$kind" "--bs=$size" "--iodepth=$depth" --ramp_time=1 "--runtime=$RUNTIME" \
          >>"$WORK/$way.$state.$size"
      done
    done
    volume_stop "$UP"
    UP=''
  done
done

printf '| reads | 4 KiB random, depth 32: IOPS | 1 MiB sequential, depth 8: MiB/s | one replica with %s: IOPS | MiB/s |\n' "$FAULTS"
printf '|---|---|---|---|---|\n'
for way in $WAYS; do
  printf '| %s |' "$way"
  for state in equal faulty; do
    printf ' %d | %d |' "$(($(median <"$WORK/$way.$state.4k") / 4096))" "$(($(median <"$WORK/$way.$state.1m") / 1048576))"
  done
  printf '\n'
done
