#!/usr/bin/env bash
# Builds the guest of the VM test: a small Debian with systemd, its kernel beside it. Takes minutes, so that the test keeps the
# result (tests/src/vm/image.rs). Root only: files get their owners.
#
# usage: tests/vm/build-guest.sh SUITE OUT-DIRECTORY        SUITE: bookworm, trixie
# makes OUT-DIRECTORY/{vmlinuz,initrd,disk.img}
set -euo pipefail
suite=$1
out=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
work=$(mktemp -d "$out/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root

# Only what mounts the root is in the initial RAM disk: an emulated processor unpacks it.
cat >"$work/prepare" <<'HOOK'
mkdir -p "$1/etc/initramfs-tools/conf.d"
echo 'MODULES=list' >"$1/etc/initramfs-tools/conf.d/guest"
printf '%s\n' virtio_pci virtio_blk ext4 >"$1/etc/initramfs-tools/modules"
HOOK
# What an emulated processor need not do at every boot is off, and modules that no virtual machine has are left out.
cat >"$work/finish" <<'HOOK'
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
  getty@tty1.service systemd-timesyncd.service nbd-client.service; do
  chroot "$1" systemctl mask "$unit" 2>/dev/null || true
done
# The journal of a boot tells the next one in what order things stopped.
mkdir -p "$1/etc/systemd/journald.conf.d"
printf '[Journal]\nStorage=persistent\nSystemMaxUse=64M\nRateLimitBurst=0\n' >"$1/etc/systemd/journald.conf.d/guest.conf"
echo guest >"$1/etc/hostname"
echo '127.0.0.1 localhost guest' >"$1/etc/hosts"
echo '/dev/vda / ext4 defaults 0 1' >"$1/etc/fstab"
chroot "$1" systemctl enable agent.service
rm -rf "$1"/usr/lib/modules/*/kernel/{sound,drivers/{gpu,media,infiniband,usb,iio,hwmon,staging,input,isdn,bluetooth}} \
  "$1"/usr/lib/modules/*/kernel/drivers/net/{wireless,ethernet}
for modules in "$1"/usr/lib/modules/*; do chroot "$1" depmod "${modules##*/}"; done
HOOK
chmod +x "$work/prepare" "$work/finish"

mmdebstrap --quiet --variant=minbase \
  --include=linux-image-amd64,systemd-sysv,udev,dbus,kmod,procps,nbd-client,fio,python3,e2fsprogs,xfsprogs,dmsetup,fdisk,uuid-runtime \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  --essential-hook="$work/prepare" \
  --customize-hook="copy-in $here/agent /usr/local/sbin" \
  --customize-hook="copy-in $here/agent.service /etc/systemd/system" \
  --customize-hook="$work/finish" \
  "$suite" "$root"

cp -L "$root"/vmlinuz "$work/vmlinuz"
cp -L "$root"/initrd.img "$work/initrd"
mkfs.ext4 -q -F -d "$root" "$work/disk.img" 8G >/dev/null
mv "$work"/{vmlinuz,initrd,disk.img} "$out/"
