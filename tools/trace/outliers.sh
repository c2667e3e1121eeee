#!/usr/bin/env bash
# Tells of slow requests of the devices below a region, lower devices included, with the stage at fault. See outliers.bt.
#
# Names the job of each request, too, if a newel-downstairs is using the file: the number in `newel slow`, /slow and the slow log.
#
# usage: tools/trace/outliers.sh [-m MILLISECONDS] [-l] PATH     (as root)
#   PATH  a region, any other file, or a block device
#   -m    what counts as slow (default 100)
#   -l    only list the devices that would be watched
#
# It costs up to half of the IOPS of small requests while it runs.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DEVICES_MAX=8
die() { echo "outliers.sh: $*" >&2; exit 1; }

milliseconds=100
list=
while getopts 'm:lh' option; do
  case $option in
    m) milliseconds=$OPTARG ;;
    l) list=1 ;;
    h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# = 1 ] || die "name one file or block device (-h tells more)"
[[ $milliseconds =~ ^[0-9]{1,7}$ ]] || die "-m $milliseconds is no number of milliseconds"
[ -e "$1" ] || die "$1 does not exist"

number_of() { # MAJOR:MINOR as the kernel counts
  echo $((${1%:*} << 20 | ${1#*:}))
}

device_of() { # PATH -> MAJOR:MINOR of the block device, or of the one that the file lies on
  if [ -b "$1" ]; then
    stat -L -c '%Hr:%Lr' -- "$1"
  else
    stat -L -c '%Hd:%Ld' -- "$1"
  fi
}

declare -A seen
watched=()
# Adds a device and all below it: the disk of a partition, what a device mapper or RAID is made of, what a loop device lies over.
add() { # MAJOR:MINOR
  local device=$1 sys disk slave backing
  [ -z "${seen[$device]:-}" ] || return 0
  seen[$device]=1
  # A file system without a device of its own (tmpfs, a network) ends the stack.
  sys=$(readlink -f "/sys/dev/block/$device") || return 0
  [ -e "$sys/dev" ] || return 0
  disk=$device
  [ ! -e "$sys/partition" ] || disk=$(cat "$sys/../dev")
  watched+=("$device $disk $(basename "$sys")")
  [ "$disk" = "$device" ] || add "$disk"
  for slave in "$sys"/slaves/*/dev; do
    [ ! -e "$slave" ] || add "$(cat "$slave")"
  done
  if [ -e "$sys/loop/backing_file" ]; then
    backing=$(cat "$sys/loop/backing_file")
    [ ! -e "$backing" ] || add "$(device_of "$backing")"
  fi
}

add "$(device_of "$1")"
[ ${#watched[@]} -gt 0 ] || die "no block device is below $1"
[ ${#watched[@]} -le $DEVICES_MAX ] || die "${#watched[@]} devices are below $1, and $DEVICES_MAX can be watched"
arguments=()
for entry in "${watched[@]}"; do
  read -r device disk name <<<"$entry"
  echo "$name ($device)"
  arguments+=("$(number_of "$device")" "$(number_of "$disk")")
done
[ -z "$list" ] || exit 0
[ "$(id -u)" = 0 ] || die "tracing needs root"
command -v bpftrace >/dev/null || die "bpftrace is not installed: apt-get install bpftrace"
[ -e /sys/kernel/tracing/events/block ] || [ -e /sys/kernel/debug/tracing/events/block ] ||
  mount -t tracefs tracefs /sys/kernel/tracing || die "this kernel has no tracepoints of block devices"

# The newel-downstairs that has the file open, if any.
program_of() { # PATH -> its program, by /proc, which is right in a container, too, and after an upgrade
  local fd
  # Processes come and go meanwhile.
  { find -L /proc/[0-9]*/fd -maxdepth 1 -samefile "$1" 2>/dev/null || true; } | while read -r fd; do
    [[ $(readlink "${fd%/fd/*}/exe") != */newel-downstairs* ]] || { echo "${fd%/fd/*}/exe"; break; }
  done
}
text=$(cat "$HERE/outliers.bt")
program=$(program_of "$1")
if [ -n "$program" ] && bpftrace -l "usdt:$program:newel_downstairs:*" 2>/dev/null | grep -q submit-start; then
  echo "with the jobs of newel-downstairs"
  text+=$(sed "s|BINARY|$program|" "$HERE/submits.bt")
fi
# As many requests as may be under way in the whole stack.
BPFTRACE_MAP_KEYS_MAX=${BPFTRACE_MAP_KEYS_MAX:-65536} exec bpftrace -B line -e "$text" "$milliseconds" "${arguments[@]}"
