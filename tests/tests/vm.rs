//! A disk for a Linux host: the built package on Debian, as real systemd services, under the kernel's own NBD client and file systems.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::time::Duration;

use newel_tests::lock::Heavy;
use newel_tests::vm::{self, Machine, Suite};
use newel_tests::wait;

const VOLUME: &str = "db";
const VOLUME_ID: &str = "5f2a6b1e-7a53-4b0e-9d0c-0d6f3f1f7c11";
const REPLICAS: usize = 3;
const UPSTAIRS: &str = "newel-upstairs@db.service";
const ATTACH: &str = "newel-attach@db.service";
const FILE_SYSTEMS: [&str; 2] = ["ext4", "xfs"];
const FSTAB: &str = "\
/dev/vda / ext4 defaults 0 1
LABEL=newel-ext4 /mnt/ext4 ext4 _netdev,errors=remount-ro,x-systemd.device-timeout=infinity 0 2
LABEL=newel-xfs /mnt/xfs xfs _netdev,x-systemd.device-timeout=infinity 0 0
";
const TCP_AS_WELL: &str = "\
[Service]
ExecStart=
ExecStart=/usr/bin/newel-upstairs run --config /etc/newel/upstairs/%i.toml --volume %i --listen unix:/run/newel/%i.sock \
 --listen tcp:127.0.0.1:10809 --status unix:/run/newel/%i.status.sock
";
/// For what takes seconds on a real processor.
const SOON: Duration = Duration::from_secs(120);
/// Any error of the device, and what file systems make of one.
const TROUBLE: &str = "I/O error|Remounting filesystem read-only|[Ss]hut(ting)? down filesystem|EXT4-fs error|\
                       XFS .*(metadata|Corruption)|hung_task|blocked for more than";
struct Host {
    machine: Machine,
}

impl Host {
    /// A guest with the package installed, three replicas, their volume, and two file systems on it.
    fn new(test: &str, suite: Suite, options: &str) -> Option<Self> {
        let machine = vm::guest(test, suite, |_| Vec::new())?;
        let mut host = Self { machine };
        host.machine.switch_on();
        vm::package::install(&mut host.machine);
        host.machine.put_program(vm::JOURNAL);
        host.configure(options);
        host.make_file_systems();
        Some(host)
    }

    fn configure(&mut self, options: &str) {
        for replica in 0..REPLICAS {
            let (name, port) = (format!("{VOLUME}-{replica}"), 7100 + replica);
            self.machine.sh(&format!(
                "runuser -u newel -- newel-downstairs create --region /var/lib/newel/{name} --size 768M \
                 --prealloc sparse --volume {VOLUME_ID}"
            ));
            let config = format!("region = \"/var/lib/newel/{name}\"\nlisten = \"127.0.0.1:{port}\"\n");
            self.machine.put(&format!("/etc/newel/downstairs/{name}.toml"), &config);
        }
        let replicas = "[\"127.0.0.1:7100\", \"127.0.0.1:7101\", \"127.0.0.1:7102\"]";
        let config = format!("volume_id = \"{VOLUME_ID}\"\nreplicas = {replicas}\n");
        self.machine.put("/etc/newel/upstairs/db.toml", &config);
        self.machine.sh("mkdir -p /etc/systemd/system/newel-upstairs@db.service.d");
        self.machine.put("/etc/systemd/system/newel-upstairs@db.service.d/tcp.conf", TCP_AS_WELL);
        self.machine.sh("systemctl daemon-reload");
        self.machine.put("/etc/newel/attach/db.conf", &format!("DEVICE=/dev/nbd0\nOPTIONS={options}\n"));
        for unit in replica_units().iter().map(String::as_str).chain([UPSTAIRS, ATTACH]) {
            self.machine.sh(&format!("systemctl enable --now {unit}"));
        }
        assert_eq!(self.machine.sh("blockdev --getsize64 --getss /dev/nbd0"), "805306368\n4096\n");
        let users = self.machine.sh("ps -o user= -C newel-upstairs,newel-downstairs | sort -u");
        assert_eq!(users, "newel\n", "nothing but the attachment needs root");
    }

    fn make_file_systems(&mut self) {
        self.machine
            .sh("printf 'size=320M\\nsize=+\\n' | sfdisk --quiet --label gpt /dev/nbd0 && udevadm settle");
        self.machine.sh("mkfs.ext4 -q -L newel-ext4 /dev/nbd0p1 && mkfs.xfs -q -f -L newel-xfs /dev/nbd0p2");
        self.machine.put("/etc/fstab", FSTAB);
        self.machine.sh("mkdir -p /mnt/ext4 /mnt/xfs && udevadm settle && systemctl daemon-reload");
        self.machine.sh("systemctl restart remote-fs.target && mountpoint /mnt/ext4 && mountpoint /mnt/xfs");
        self.check_mounts();
    }

    /// fio with verification, and a program that syncs, on both file systems, until they are stopped.
    fn start_load(&mut self) {
        for fs in FILE_SYSTEMS {
            self.machine.sh(&format!(
                "systemd-run --quiet --unit=load-fio-{fs} --property=KillSignal=SIGINT --property=KillMode=mixed \
                 --property=TimeoutStopSec=300 --collect \
                 fio --name=load --filename=/mnt/{fs}/fio --size=24M --rw=randwrite --bsrange=4k-64k \
                 --ioengine=libaio --iodepth=8 --direct=1 --verify=crc32c --verify_backlog=64 --verify_fatal=1 \
                 --verify_state_save=0 --time_based --runtime=3600 --output=/run/fio-{fs}"
            ));
        }
        self.machine.sh("systemd-run --quiet --collect --unit=load-journal journal write /mnt/ext4 /mnt/xfs");
        self.progresses();
    }

    /// The last number that the program on this file system was told is safe.
    fn safe(&self, fs: &str) -> u64 {
        let told = self.machine.told();
        // The last line may be cut short.
        let whole = told.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole
            .lines()
            .filter_map(|line| line.strip_prefix("/mnt/")?.strip_prefix(fs)?.trim().parse().ok())
            .max()
            .unwrap_or(0)
    }

    /// Both programs go on.
    fn progresses(&mut self) {
        let before = FILE_SYSTEMS.map(|fs| self.safe(fs));
        for (fs, before) in FILE_SYSTEMS.iter().zip(before) {
            wait::until(&format!("a sync on {fs} after number {before}"), SOON, || {
                (self.safe(fs) > before + 2).then_some(())
            });
        }
    }

    /// The load never met an error.
    fn load_is_well(&mut self) {
        self.progresses();
        for unit in ["load-fio-ext4", "load-fio-xfs", "load-journal"] {
            self.machine.sh(&format!("systemctl is-active {unit}"));
        }
        self.check_mounts();
    }

    fn stop_load(&mut self) {
        self.load_is_well();
        self.machine.sh("systemctl stop load-journal");
        for fs in FILE_SYSTEMS {
            self.machine.sh(&format!("systemctl stop load-fio-{fs}"));
            let report = self.machine.sh(&format!("cat /run/fio-{fs}"));
            assert!(report.contains("err= 0"), "{report}");
        }
        self.check_journals();
    }

    fn check_journals(&mut self) {
        for fs in FILE_SYSTEMS {
            let safe = self.safe(fs);
            let found: u64 = self.machine.sh(&format!("journal check /mnt/{fs}")).trim().parse().unwrap();
            assert!(found >= safe && safe > 0, "{fs}: {safe} lines were safe, {found} are there");
        }
    }

    fn check_mounts(&mut self) {
        for fs in FILE_SYSTEMS {
            let options = self.machine.sh(&format!("findmnt --noheadings --output OPTIONS /mnt/{fs}"));
            assert!(options.starts_with("rw"), "{fs} is mounted {options}");
        }
        let trouble = self.machine.run(&format!("dmesg | grep -E '{TROUBLE}'"));
        assert_eq!(trouble.code, 1, "{trouble}");
    }

    fn all_active(&mut self) {
        let count = "newel status --json --volume db | grep -o '\"state\":\"active\"' | wc -l";
        self.machine.until(&format!("test $({count}) = {REPLICAS}"), SOON);
    }

    /// What can't be done is said clearly, and changes nothing.
    fn refusals(&mut self) {
        let refused = [
            ("newel detach /dev/nbd0", "in use: unmount it first"),
            ("newel attach other /dev/nbd0", "in use: attached by newel:db"),
            ("newel attach x /dev/nbd1 --address unix:/run/newel/db.sock", "no export \"x\""),
            (
                "newel attach gone /dev/nbd1 --wait 2s",
                "no NBD connection to unix:/run/newel/gone.sock within 2s",
            ),
            ("newel attach db /dev/sda", "is not an NBD device"),
            ("newel attach db /dev/nbd1 --block-size 8192", "512, 1024, 2048 or 4096"),
            ("newel detach /dev/nbd1", "is not attached"),
            ("runuser -u newel -- newel attach db /dev/nbd1", "root only"),
        ];
        for (command, part) in refused {
            let said = self.machine.run(command);
            assert!(matches!(said.code, 1 | 2) && said.output.contains(part), "{part:?} is not said: {said}");
        }
        self.check_mounts();
    }

    /// A unit that ended in some way under load is back, and nobody has noticed.
    fn ended(&mut self, unit: &str, how: &str) {
        let pid = format!("systemctl show --property MainPID --value {unit}");
        let before = self.machine.sh(&pid);
        self.machine.sh(how);
        let back = format!("systemctl is-active {unit} && test $({pid}) != {}", before.trim());
        self.machine.until(&back, SOON);
        self.all_active();
        self.load_is_well();
    }

    fn each_unit_restarted_and_killed(&mut self) {
        for unit in replica_units().iter().map(String::as_str).chain([UPSTAIRS, ATTACH]) {
            self.ended(unit, &format!("systemctl restart {unit}"));
            self.ended(unit, &format!("systemctl kill --kill-who=main --signal=KILL {unit}"));
        }
    }

    /// The package goes over to another build under load; it does not go away under it.
    fn upgraded(&mut self) {
        let pids = "systemctl show --property MainPID --value 'newel-*@*.service' | sort";
        let before = self.machine.sh(pids);
        self.machine.sh("dpkg -i /root/newel.deb");
        assert_ne!(self.machine.sh(pids), before, "the new programs run");
        self.all_active();
        let removed = self.machine.run("dpkg -r newel");
        assert!(removed.code != 0 && removed.output.contains("/dev/nbd0 is in use"), "{removed}");
        self.machine.sh(&format!("systemctl is-active {ATTACH}"));
        self.load_is_well();
    }

    /// In mid-load, and comes back.
    fn lose_power(&mut self) {
        self.start_load();
        self.machine.cut_power();
        self.machine.switch_on();
        self.check_after_boot();
    }

    /// After a boot: everything is up and mounted by itself, nothing that was safe is lost, and the file systems are clean.
    fn check_after_boot(&mut self) {
        for target in ["remote-fs.target", "multi-user.target"] {
            self.machine.until(&format!("systemctl is-active {target}"), SOON * 3);
        }
        self.check_mounts();
        self.check_journals();
        self.all_active();
        self.machine.sh("umount /mnt/ext4 /mnt/xfs && e2fsck -fn /dev/nbd0p1 && xfs_repair -n /dev/nbd0p2");
        self.machine.sh("mount /mnt/ext4 && mount /mnt/xfs");
    }

    /// A volume that nobody serves holds up the start of a host for a while, not for ever.
    fn start_what_is_away(&mut self) {
        self.machine.put("/etc/newel/attach/away.conf", "DEVICE=/dev/nbd2\n");
        self.machine.sh("systemctl start --no-block newel-attach@away");
        self.machine.until("test $(systemctl is-active newel-attach@away) = activating", SOON);
    }

    fn check_what_is_away(&mut self) {
        self.machine.until("systemctl is-active newel-attach@away", SOON);
        self.machine.sh("test ! -e /sys/block/nbd2/pid && systemctl stop newel-attach@away");
    }

    /// The field's client with the flags that the documentation names; nothing is mounted.
    fn attached_by_nbd_client(&mut self) {
        self.machine.sh("nbd-client -N db -u /run/newel/db.sock /dev/nbd1 -b 4096");
        self.machine.until("test -e /dev/nbd1p1", SOON);
        let write = "dd if=/dev/urandom of=/mnt/ext4/by-nbd-client bs=1M count=4 conv=fsync status=none";
        let sum = "sha256sum </mnt/ext4/by-nbd-client";
        let written = self.machine.sh(&format!("mount /dev/nbd1p1 /mnt/ext4 && {write} && {sum}"));
        self.machine.sh("umount /mnt/ext4 && mount /dev/nbd1p1 /mnt/ext4");
        assert_eq!(self.machine.sh(sum), written);
        self.machine.sh("umount /mnt/ext4 && e2fsck -fn /dev/nbd1p1 && nbd-client -d /dev/nbd1");
    }

    /// The boot before this one ended in the right order, without a wait for anybody.
    fn check_order_of_shutdown(&mut self) {
        let journal = self.machine.sh("journalctl --boot=-1 --no-pager --output=short-monotonic _PID=1 | \
             grep -E 'Unmounted|Stopped|timed out|Killing'");
        let lines: Vec<&str> = journal.lines().collect();
        // Restarts before it are told alike.
        let at = |what: &str| {
            let found = lines.iter().rposition(|line| line.contains(what));
            found.unwrap_or_else(|| panic!("{what:?} is missing in {journal}"))
        };
        let device = at(&format!("Stopped {ATTACH}"));
        assert!(
            at("Unmounted mnt-ext4.mount") < device && at("Unmounted mnt-xfs.mount") < device,
            "{journal}"
        );
        let volume = at(&format!("Stopped {UPSTAIRS}"));
        assert!(device < volume, "{journal}");
        for replica in replica_units() {
            assert!(volume < at(&format!("Stopped {replica}")), "{journal}");
        }
        let waited = lines.iter().find(|line| line.contains("timed out") || line.contains("Killing"));
        assert_eq!(waited, None, "{journal}");
    }

    /// Detached cleanly, all replicas hold the same, and the package goes without them.
    fn take_down(&mut self) {
        self.machine.sh("umount /mnt/ext4 /mnt/xfs");
        self.machine.sh(&format!("systemctl stop {ATTACH}"));
        self.machine.sh("test ! -e /sys/block/nbd0/pid");
        self.attached_by_nbd_client();
        self.machine.sh(&format!("systemctl stop {UPSTAIRS} 'newel-downstairs@*'"));
        let mut digests = Vec::new();
        for replica in 0..REPLICAS {
            let region = format!("/var/lib/newel/{VOLUME}-{replica}");
            let told = self.machine.sh(&format!("newel-downstairs check --region {region}"));
            digests.push(told.lines().find(|line| line.starts_with("digest:")).unwrap().to_owned());
        }
        assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
        self.machine.sh("dpkg --purge newel && test -e /var/lib/newel/db-0 && test ! -e /etc/newel");
    }
}

fn replica_units() -> Vec<String> {
    (0..REPLICAS).map(|replica| format!("newel-downstairs@{VOLUME}-{replica}.service")).collect()
}

#[test]
fn a_debian_host_lives_on_it() {
    let test = "a_debian_host_lives_on_it";
    let _turn = Heavy::take();
    vm::anew_if_frozen(test, || a_whole_life(test));
}

fn a_whole_life(test: &str) {
    let Some(mut host) = Host::new(test, Suite::Bookworm, "") else { return };

    host.refusals();
    host.start_what_is_away();
    host.start_load();
    host.each_unit_restarted_and_killed();

    // An upstairs that is away for a minute is a pause: nothing fails, and nothing is told safe.
    host.machine.sh(&format!("systemctl stop {UPSTAIRS}"));
    let before = FILE_SYSTEMS.map(|fs| host.safe(fs));
    wait::pass(Duration::from_secs(60));
    host.check_mounts();
    assert_eq!(FILE_SYSTEMS.map(|fs| host.safe(fs)), before, "a sync without an upstairs");
    host.machine.sh(&format!("systemctl start {UPSTAIRS}"));
    host.all_active();
    host.check_what_is_away();
    host.upgraded();
    host.stop_load();

    host.start_load();
    host.machine.reboot();
    host.check_after_boot();
    host.check_order_of_shutdown();

    for _ in 0..3 {
        host.lose_power();
    }

    host.take_down();
    host.machine.power_off();
}

/// The same in short with the kernel of Debian 13, and with several connections, over TCP.
#[test]
fn a_debian_13_host_lives_on_it() {
    let test = "a_debian_13_host_lives_on_it";
    let _turn = Heavy::take();
    vm::anew_if_frozen(test, || a_short_life(test));
}

fn a_short_life(test: &str) {
    let options = "--connections 4 --resend 10s --address tcp:127.0.0.1:10809";
    let Some(mut host) = Host::new(test, Suite::Trixie, options) else { return };

    host.start_load();
    for unit in [UPSTAIRS, ATTACH] {
        host.ended(unit, &format!("systemctl restart {unit}"));
        host.ended(unit, &format!("systemctl kill --kill-who=main --signal=KILL {unit}"));
    }
    host.machine.reboot();
    host.check_after_boot();
    host.check_order_of_shutdown();

    host.lose_power();

    host.take_down();
    host.machine.power_off();
}
