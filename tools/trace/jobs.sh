#!/usr/bin/env bash
# Tells of slow jobs of a running upstairs by its probes, each with its replicas and their stages. See jobs.bt; `newel slow` shows the same
# without tracing, but only of jobs over the threshold that it was started with.
#
# usage: tools/trace/jobs.sh [-m MILLISECONDS] PROCESS     (as root)
#   PROCESS  the id of a newel-upstairs (systemctl show -p MainPID --value newel-upstairs@VOLUME)
#   -m       what counts as slow (default 100)
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() { echo "jobs.sh: $*" >&2; exit 1; }

milliseconds=100
while getopts 'm:h' option; do
  case $option in
    m) milliseconds=$OPTARG ;;
    h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# = 1 ] || die "name the process of one upstairs (-h tells more)"
[[ $milliseconds =~ ^[0-9]{1,7}$ ]] || die "-m $milliseconds is no number of milliseconds"
[[ $1 =~ ^[0-9]{1,10}$ && -e /proc/$1 ]] || die "$1 is not the id of a process"
[ "$(id -u)" = 0 ] || die "tracing needs root"
command -v bpftrace >/dev/null || die "bpftrace is not installed: apt-get install bpftrace"
program=/proc/$1/exe
bpftrace -l "usdt:$program:newel_upstairs:*" 2>/dev/null | grep -q job-start ||
  die "process $1 ($(readlink "$program" || echo gone)) has no probes of a newel-upstairs"
# What is under way.
export BPFTRACE_MAP_KEYS_MAX=${BPFTRACE_MAP_KEYS_MAX:-65536}
exec bpftrace -B line -e "$(sed "s|BINARY|$program|" "$HERE/jobs.bt")" "$milliseconds"
