#!/usr/bin/env bash
# Every test of the workspace, with what they need: installs the programs (as root, by apt), builds the daemons, runs the
# tests in release, and ends with one line: N passed, N failed, N skipped.
#
# usage: tools/test.sh [CARGO-TEST-ARGUMENT...]     for example: tools/test.sh --test failure
#        NEWEL_VM=0 leaves out the tests in virtual machines, and QEMU
set -euo pipefail
cd "$(dirname "$0")/.."

# --- what the tests drive -------------------------------------------------------------------------
packages() { # program and the Debian package that has it
  cat <<'END'
fio fio
nbdinfo libnbd-bin
nbdcopy libnbd-bin
nbd-client nbd-client
/usr/lib/python3/dist-packages/nbd.py python3-libnbd
qemu-img qemu-utils
qemu-io qemu-utils
mke2fs e2fsprogs
mkfs.ext4 e2fsprogs
losetup mount
fsfreeze util-linux
mkfs.xfs xfsprogs
mkfs.btrfs btrfs-progs
strace strace
jq jq
systemd-analyze systemd
chromium chromium
bpftrace bpftrace
dpkg-shlibdeps dpkg-dev
strip binutils
END
  # Tests in virtual machines: a quarter of an hour, and a QEMU that takes newer tools of its own away.
  [ "${NEWEL_VM:-}" = 0 ] || printf '%s\n' 'qemu-system-x86_64 qemu-system-x86' 'mmdebstrap mmdebstrap'
}
install() { # PACKAGE...
  local packages=$*
  case " $packages " in
    *" qemu-system-x86 "*)
      # QEMU's tools of another version exclude it, and apt would take them away.
      packages="$packages qemu-utils=$(apt-cache policy qemu-system-x86 | sed -n 's/^ *Candidate: //p')" ;;
  esac
  # shellcheck disable=SC2086 # several packages
  apt-get install -y --no-install-recommends --allow-downgrades $packages >/dev/null
}
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
missing=$(packages | while read -r program package; do
  command -v "$program" >/dev/null || [ -e "$program" ] || echo "$package"
done | sort -u | tr '\n' ' ')
if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing: $missing"
    # shellcheck disable=SC2086 # several packages
    install $missing || { apt-get update >/dev/null && install $missing; } ||
      echo "could not install: $missing; the tests that need them will be skipped" >&2
  else
    echo "missing: $missing; the tests that need them will be skipped (as root they would be installed)" >&2
  fi
fi
# The package would start a service: it is downloaded and unpacked, and needs nothing but libc.
prometheus=${NEWEL_PROMETHEUS_CACHE:-${XDG_CACHE_HOME:-/var/cache}/newel-prometheus}
download() { apt-get download -o APT::Sandbox::User=root prometheus >/dev/null; }
unpack_prometheus() {
  local new status=0
  mkdir -p "$(dirname "$prometheus")" && new=$(mktemp -d "$prometheus.XXXXXX") || return
  # It gets its name once it is whole, and runs.
  (cd "$new" && { download || { apt-get update >/dev/null && download; }; } && dpkg -x prometheus_*.deb all) &&
    "$new/all/usr/bin/prometheus" --version >/dev/null && "$new/all/usr/bin/promtool" --version >/dev/null &&
    rm -rf "$prometheus" && mv -T "$new/all" "$prometheus" || status=$?
  rm -rf "$new"
  return "$status"
}
if ! { command -v prometheus && command -v promtool; } >/dev/null &&
  ! { [ -x "$prometheus/usr/bin/prometheus" ] && [ -x "$prometheus/usr/bin/promtool" ]; }; then
  echo "unpacking prometheus into $prometheus"
  unpack_prometheus || echo "could not unpack prometheus; the test that needs it will be skipped" >&2
fi

# --- build and run --------------------------------------------------------------------------------
# The tests start the daemons from target/release: `cargo test` alone doesn't build them.
cargo build --release --workspace
# The replica that submits on its reactor, a control of tests/starved.rs: a program of its own, so that the real one stays as it is.
cargo build --release --workspace --features newel-downstairs/test-faults --bin newel-downstairs-inline
target=${CARGO_TARGET_DIR:-target}
log=$target/test.log
status=0
cargo test --release --workspace --no-fail-fast "$@" -- --show-output 2>&1 | tee "$log" || status=$?
# The tests that try every engine, once more with the one that is not built by default.
[ $# != 0 ] || cargo test --release -p newel-downstairs --features uring --lib -- --show-output \
  engine_tests pool::tests device_tests 2>&1 | tee -a "$log" || status=$?

# --- the totals -----------------------------------------------------------------------------------
# A test that can't run here prints SKIPPED: and returns, which the runner takes for a pass. A skipped part of a test,
# named in brackets, leaves the test itself passed.
skips=$({ grep -E '^SKIPPED: ' "$log" || true; } | sort -u)
[ -z "$skips" ] || echo "$skips"
skipped_tests=$(grep -cE '^SKIPPED: [^ (]+:' <<<"$skips" || true)
skipped_parts=$(($(grep -c . <<<"$skips" || true) - skipped_tests))
awk -v skipped="$skipped_tests" -v parts="$skipped_parts" '
  /^test result:/ { passed += $4; failed += $6; ignored += $8 }
  END { printf "%d passed, %d failed, %d skipped\n", passed - skipped, failed, ignored + skipped + parts }' "$log"
exit "$status"
