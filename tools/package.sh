#!/usr/bin/env bash
# Builds the Debian package, newel_VERSION_ARCH.deb: programs, units, user and directories, manual pages, completions, examples.
#
# usage: tools/package.sh [-b DIRECTORY-OF-PROGRAMS] [-o OUTPUT-DIRECTORY]
#        without -b it builds the release first; the result lies in target/debian
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
programs=
out=$target/debian
while getopts b:o:h option; do
  case $option in
    b) programs=$OPTARG ;;
    o) out=$OPTARG ;;
    *) sed -n '2,5s/^# \{0,1\}//p' "$0"; [ "$option" = h ]; exit ;;
  esac
done
for needed in dpkg-deb dpkg-shlibdeps strip gzip; do
  command -v "$needed" >/dev/null || { echo "$needed is missing: apt-get install dpkg-dev binutils gzip" >&2; exit 1; }
done
if [ -z "$programs" ]; then
  cargo build --release -p newel-tools -p newel-upstairs -p newel-downstairs
  programs=$target/release
fi
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
[ -n "$version" ] || { echo "Cargo.toml has no version" >&2; exit 1; }
architecture=$(dpkg --print-architecture)
# The same tree gives the same package.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

mkdir -p "$out"
work=$(mktemp -d "$out/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/newel
umask 022
put() { install -D -m "$1" "$2" "$root/$3"; } # MODE FROM TO

# --- what lies where ------------------------------------------------------------------------------
mkdir "$work/documents"
for program in newel newel-upstairs newel-downstairs; do
  [ -x "$programs/$program" ] || { echo "$programs/$program is missing: cargo build --release" >&2; exit 1; }
  "$programs/$program" documents "$work/documents"
  put 755 "$programs/$program" "usr/bin/$program"
  # Names of functions stay, for a backtrace; lines go, which are most of the size.
  strip --strip-debug --remove-section=.comment "$root/usr/bin/$program"
  put 644 "$work/documents/$program.bash" "usr/share/bash-completion/completions/$program"
  put 644 "$work/documents/_$program" "usr/share/zsh/vendor-completions/_$program"
  put 644 "$work/documents/$program.fish" "usr/share/fish/vendor_completions.d/$program.fish"
done
for page in "$work"/documents/*.1; do
  case $page in *-documents.1 | *-help.1 | *-help-*.1) continue ;; esac
  put 644 "$page" "usr/share/man/man1/${page##*/}"
done
gzip -9n "$root"/usr/share/man/man1/*.1
for unit in tools/systemd/*.service tools/systemd/*.target; do
  put 644 "$unit" "usr/lib/systemd/system/${unit##*/}"
done
put 644 tools/systemd/newel.sysusers.conf usr/lib/sysusers.d/newel.conf
put 644 tools/systemd/newel.tmpfiles.conf usr/lib/tmpfiles.d/newel.conf
install -d -m 755 "$root"/etc/newel/{upstairs,downstairs,attach}
put 644 tools/debian/copyright usr/share/doc/newel/copyright
put 644 tools/README.md usr/share/doc/newel/operations.md
gzip -9n "$root/usr/share/doc/newel/operations.md"
for example in tools/debian/examples/*; do
  put 644 "$example" "usr/share/doc/newel/examples/${example##*/}"
done
# The dashboard, the alert rules and the tracing: nothing uses them unasked.
for file in tools/grafana/newel.json tools/grafana/alerts.yml tools/trace/*.bt; do
  put 644 "$file" "usr/share/newel/${file#tools/}"
done
for script in tools/trace/*.sh; do
  put 755 "$script" "usr/share/newel/${script#tools/}"
done

# --- what dpkg is told ----------------------------------------------------------------------------
mkdir "$work/debian"
printf 'Source: newel\n\nPackage: newel\nArchitecture: any\n' >"$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O newel/usr/bin/* 2>"$work/shlibdeps.log" | sed -n 's/^shlibs:Depends=//p')
[ -n "$depends" ] || { cat "$work/shlibdeps.log" >&2; echo "no dependencies could be told" >&2; exit 1; }
size=$(du -sk --apparent-size "$root" | cut -f1)
install -d -m 755 "$root/DEBIAN"
sed -e "s/@VERSION@/$version/; s/@ARCH@/$architecture/; s/@SIZE@/$size/; s/@DEPENDS@/$depends/" \
  tools/debian/control.in >"$root/DEBIAN/control"
for script in postinst prerm postrm; do
  install -m 755 "tools/debian/$script" "$root/DEBIAN/$script"
done
(cd "$root" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
find "$root" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

package=$out/newel_${version}_$architecture.deb
dpkg-deb --root-owner-group --build "$root" "$package" >/dev/null
echo "$package"
