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

# fio puts warnings before its report, one of them without an end of its line.
report_of() { sed -n '/{$/,$p' "$1" | sed '1s/^.*{$/{/'; }
