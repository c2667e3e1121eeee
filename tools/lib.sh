# shellcheck shell=bash
# Shared by the scripts beside it: where the programs are, and a volume of their own to measure.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BIN=${NEWEL_BIN_DIR:-$ROOT/target/release}

die() { echo "$(basename "$0"): $*" >&2; exit 1; }

need() { # PROGRAM...
  local program
  for program in "$@"; do
    command -v "$program" >/dev/null || die "$program is not installed (tools/test.sh installs what is needed)"
  done
}

await() { # SECONDS WHAT COMMAND... : until the command succeeds
  local until=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$until" ] || die "$what: not in time"
    sleep 0.05
  done
}

volume_serves() { # DIR PID
  grep -q '^Ctrl-C stops' "$1/up.out" && return 0
  kill -0 "$2" 2>/dev/null || { cat "$1/up.out" >&2; die "newel up ended"; }
  return 1
}

# Runs `newel up` on DIR with the given arguments. Sets UP (its pid) and URI.
volume_start() { # DIR ARGUMENT...
  local dir=$1
  shift
  [ -x "$BIN/newel" ] || die "$BIN/newel is missing: run cargo build --release"
  mkdir -p "$dir"
  : >"$dir/up.out"
  setsid "$BIN/newel" up --dir "$dir" "$@" >"$dir/up.out" 2>&1 </dev/null &
  UP=$!
  await 300 "newel up on $dir" volume_serves "$dir" "$UP"
  # shellcheck disable=SC2034 # for the caller
  URI=$(sed -n 's/^NBD: //p' "$dir/up.out" | head -1)
}

volume_pid() { # DIR ROLE
  jq -e --arg role "$2" '.[$role]' "$1/pids.json"
}

volume_stop() { # PID
  kill "$1" 2>/dev/null || return 0
  while kill -0 "$1" 2>/dev/null; do sleep 0.05; done
}

volumes_stop() { # all of UPS
  local pid
  for pid in "${UPS[@]}"; do volume_stop "$pid"; done
  UPS=()
}

# fio puts warnings before its report, one of them without an end of its line.
report_of() { sed -n '/{$/,$p' "$1" | sed '1s/^.*{$/{/'; }

# Two loads, one for each of two volumes, in turns of 0.2 s: what neighbours do to this machine hits both alike. Needs URIS and WORK; sets
# LOADS, which a script that is interrupted has to kill. What each did stands in WORK/report-1 and -2.
loads_in_turns() { # SECONDS-FOR-EACH FIO-ARGUMENT...
  local number turn turns=$(($1 * 5))
  shift
  LOADS=()
  for number in 1 2; do
    fio --name=run --ioengine=nbd "--uri=${URIS[number - 1]}" --thread "$@" --time_based --runtime=3600 --norandommap --randrepeat=0 \
      --output-format=json --output="$WORK/report.$number" >/dev/null 2>"$WORK/err-$number" &
    LOADS+=($!)
  done
  sleep 0.5
  kill -STOP "${LOADS[@]}"
  for turn in $(seq "$turns"); do
    # Who comes first takes turns, too.
    for number in $((turn % 2)) $((1 - turn % 2)); do
      kill -CONT "${LOADS[number]}"
      sleep 0.2
      kill -STOP "${LOADS[number]}"
    done
  done
  kill -INT "${LOADS[@]}"
  kill -CONT "${LOADS[@]}"
  for number in 1 2; do
    # Interrupted, fio reports and ends with an error.
    wait "${LOADS[number - 1]}" || true
    report_of "$WORK/report.$number" >"$WORK/report-$number"
    jq -e '.jobs[0]' "$WORK/report-$number" >/dev/null || die "fio: $(cat "$WORK/err-$number")"
  done
  LOADS=()
}

median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
