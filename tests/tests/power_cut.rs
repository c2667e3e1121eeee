//! A region on a disk that loses power at every flush and in between, and on one that fails or forgets writes for a while.
//!
//! The guest's kernel records every write of one replica (dm-log-writes); on this host the disk is put together as a loss of power at
//! some moment may have left it, and a replica is started on it.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::process::Command;
use std::time::Duration;

use newel_protocol::{BLOCK_BYTES, BlockKind, BlockRange, BlockState};
use newel_tests::cluster::own_address;
use newel_tests::command::{Running, program, temp_dir};
use newel_tests::lock::Heavy;
use newel_tests::pattern::Random;
use newel_tests::seed;
use newel_tests::vm::{self, Disk, Loss, Machine, Suite, WriteLog};
use newel_tests::wait;
use newel_tests::wire::Peer;

const VOLUME_ID: &str = "5f2a6b1e-7a53-4b0e-9d0c-0d6f3f1f7c11";
const VOLUME_BYTES: u64 = 16 << 20;
const BLOCKS: u64 = VOLUME_BYTES / BLOCK_BYTES as u64;
const BLOCKS_PER_EXTENT: u32 = 1024;
/// Of the device with the recorded region: the volume, its contexts, header and activity log.
const DEVICE_BYTES: usize = 24 << 20;
const ROUNDS: usize = 50;
const WRITES_PER_ROUND: usize = 24;
const CUTS_BETWEEN: u64 = 60;
/// Above every generation of the guest.
const GENERATION: u32 = 1000;
const SOON: Duration = Duration::from_secs(120);
/// The unit's drop-in for a region on a device.
const ON_A_DEVICE: &str = "[Service]\nSupplementaryGroups=disk\nDeviceAllow=block-device-mapper rw\n";

/// What the guest wrote: the blocks of each round, from 1.
struct Rounds(Vec<Vec<u64>>);

impl Rounds {
    fn parse(told: &str) -> Self {
        let numbers = |line: &str| line.split(' ').map(|word| word.parse().unwrap()).collect::<Vec<u64>>();
        let mut rounds = vec![Vec::new()];
        for line in told.lines() {
            let line = numbers(line);
            assert_eq!(line[0], rounds.len() as u64);
            rounds.push(line[1..].to_vec());
        }
        Self(rounds)
    }

    /// The last round up to `flushed` that wrote this block; 0 if none did.
    fn at_least(&self, block: u64, flushed: usize) -> usize {
        (1..=flushed).rev().find(|&round| self.0[round].contains(&block)).unwrap_or(0)
    }

    fn written_after(&self, block: u64, flushed: usize) -> bool {
        self.0[flushed + 1..].iter().any(|round| round.contains(&block))
    }
}

/// The round of a sector that the guest wrote into this block, 0 if it was never written.
fn round_of(sector: &[u8], block: u64) -> Result<usize, String> {
    if sector.iter().all(|&byte| byte == 0) {
        return Ok(0);
    }
    let text = String::from_utf8_lossy(sector);
    let words: Vec<&str> = text.split(' ').collect();
    match words[..] {
        ["round", round, "block", found, ..] if found.parse() == Ok(block) => {
            round.parse().map_err(|_| format!("block {block} holds {round:?}"))
        }
        _ => Err(format!("block {block} holds {:?}", text.get(..40))),
    }
}

/// A block as it was found holds at least what was flushed. `quiet`: nothing was under way.
fn check_block(
    block: u64,
    state: BlockState,
    data: Option<&[u8]>,
    rounds: &Rounds,
    (flushed, quiet): (usize, bool),
) -> Result<(), String> {
    let least = rounds.at_least(block, flushed);
    let sectors = || data.unwrap_or_default().chunks(512).map(|sector| round_of(sector, block));
    let found = sectors().collect::<Result<Vec<usize>, String>>()?;
    let oldest = found.iter().copied().min().unwrap_or(0);
    if oldest < least {
        return Err(format!("block {block} holds round {oldest}, but round {least} was flushed ({state:?})"));
    }
    match state.kind {
        BlockKind::Data if found.iter().any(|&round| round != oldest) => {
            Err(format!("block {block} is said to be sound and is torn: rounds {found:?}"))
        }
        BlockKind::Data | BlockKind::Zero => Ok(()),
        BlockKind::Unverified if quiet || !rounds.written_after(block, flushed) => {
            Err(format!("block {block} is not verified, and nothing was under way there"))
        }
        BlockKind::Unverified => Ok(()),
        BlockKind::Unreadable => Err(format!("block {block} can't be read")),
    }
}

/// A replica opens this disk, and has everything that was flushed.
fn check_disk(image: &[u8], rounds: &Rounds, flushed: usize, quiet: bool) -> Result<(), String> {
    let dir = temp_dir();
    let region = dir.path().join("region");
    std::fs::write(&region, image).unwrap();
    let address = own_address();
    let mut command = Command::new(program("newel-downstairs"));
    command.args(["run", "--listen", &address, "--region"]).arg(&region);
    let mut replica = Running::start(&mut command);
    let peer = wait::try_until(SOON, || {
        if !replica.running() {
            return Some(Err(format!("the region does not open: {}", replica.stderr())));
        }
        Peer::greet(&address, VOLUME_ID.parse().unwrap()).ok().map(Ok)
    });
    let mut peer = peer.ok_or("the replica does not answer")??;
    peer.promote(GENERATION).map_err(|error| error.to_string())?;
    for extent in 0..BLOCKS / u64::from(BLOCKS_PER_EXTENT) {
        let first = extent * u64::from(BLOCKS_PER_EXTENT);
        let range = BlockRange::new(first, BLOCKS_PER_EXTENT);
        let (states, data) = peer.read_raw(extent + 1, range).map_err(|error| error.to_string())?;
        let mut data = data.chunks(BLOCK_BYTES);
        for (block, &state) in (first..).zip(&states) {
            let has_data = matches!(state.kind, BlockKind::Data | BlockKind::Unverified);
            let found = if has_data { data.next() } else { None };
            check_block(block, state, found, rounds, (flushed, quiet))?;
        }
    }
    Ok(())
}

/// The log at its flush marks, and in between.
fn check_log(log: &WriteLog, rounds: &Rounds, seed: u64) {
    let marks = log.marks("flushed-");
    assert_eq!(marks.len(), ROUNDS, "every flush has its mark");
    for (index, &mark) in marks.iter().enumerate() {
        let image = log.image(DEVICE_BYTES, mark, Loss::Nothing, 0);
        check_disk(&image, rounds, index + 1, true)
            .unwrap_or_else(|error| panic!("flush {}: {error}", index + 1));
    }
    let mut random = Random::new(seed);
    let first = marks[0];
    let mut failed_without_flushes = 0;
    for cut in 0..CUTS_BETWEEN {
        let last = first + usize::try_from(random.below((log.length() - first) as u64)).unwrap();
        let flushed = marks.partition_point(|&mark| mark <= last);
        let (loss, seed) = (if cut % 2 == 0 { Loss::Writes } else { Loss::Sectors }, random.below(1 << 40));
        let image = log.image(DEVICE_BYTES, last, loss, seed);
        check_disk(&image, rounds, flushed, false)
            .unwrap_or_else(|error| panic!("cut behind entry {last}, {loss:?}, seed {seed}: {error}"));
        // A disk that takes flushes and does nothing loses what was flushed, and is seen to.
        if cut < 8 && flushed < ROUNDS {
            let liar = log.image_of_a_liar(DEVICE_BYTES, (marks[flushed - 1], marks[flushed]), loss, seed);
            failed_without_flushes += u32::from(check_disk(&liar, rounds, flushed + 1, false).is_err());
        }
    }
    assert!(failed_without_flushes > 0, "a disk that forgets what was flushed must be seen");
}

struct Guest {
    machine: Machine,
}

impl Guest {
    /// Replica 1 lies on the device `name` of the device mapper.
    fn configure(&mut self, name: &str) {
        for replica in 0..3 {
            let region = if replica == 1 {
                format!("/dev/mapper/{name}")
            } else {
                format!("/var/lib/newel/db-{replica}")
            };
            let config = format!("region = \"{region}\"\nlisten = \"127.0.0.1:{}\"\n", 7100 + replica);
            self.machine.put(&format!("/etc/newel/downstairs/db-{replica}.toml"), &config);
        }
    }

    fn create_regions(&mut self) {
        self.machine.sh("modprobe dm-log-writes && modprobe dm-flakey");
        self.machine.sh(
            "dmsetup create logged --table \"0 $(blockdev --getsz /dev/disk/by-id/virtio-data) log-writes \
             /dev/disk/by-id/virtio-data /dev/disk/by-id/virtio-log\"",
        );
        let create =
            format!("newel-downstairs create --size 16M --prealloc sparse --volume {VOLUME_ID} --region");
        for region in ["/var/lib/newel/db-0", "/var/lib/newel/db-2"] {
            self.machine.sh(&format!("runuser -u newel -- {create} {region}"));
        }
        self.machine.sh(&format!("{create} /dev/mapper/logged"));
        self.machine.sh("mkdir -p /etc/systemd/system/newel-downstairs@db-1.service.d");
        self.machine.put("/etc/systemd/system/newel-downstairs@db-1.service.d/device.conf", ON_A_DEVICE);
        self.machine.sh("systemctl daemon-reload");
        let replicas = "[\"127.0.0.1:7100\", \"127.0.0.1:7101\", \"127.0.0.1:7102\"]";
        let config = format!("volume_id = \"{VOLUME_ID}\"\nreplicas = {replicas}\n");
        self.machine.put("/etc/newel/upstairs/db.toml", &config);
        self.machine.put("/etc/newel/attach/db.conf", "DEVICE=/dev/nbd0\n");
    }

    fn start(&mut self) {
        self.machine.sh("systemctl start newel-downstairs@db-{0,1,2} newel-upstairs@db newel-attach@db");
        self.await_active(3);
    }

    fn stop(&mut self) {
        self.machine.sh("systemctl stop newel-attach@db && systemctl stop newel-upstairs@db");
        self.machine.sh("systemctl stop newel-downstairs@db-{0,1,2}");
    }

    fn await_active(&mut self, count: usize) {
        let active = "newel status --json --volume db | grep -o '\"state\":\"active\"' | wc -l";
        self.machine.until(&format!("test $({active}) = {count}"), SOON);
    }

    /// Records the life of replica 1, on which every flush depends, as replica 2 is away.
    fn record(&mut self, seed: u64) -> Rounds {
        self.configure("logged");
        self.start();
        self.machine.sh("systemctl stop newel-downstairs@db-2");
        self.await_active(2);
        let told = self.machine.sh(&format!(
            "blocks /dev/nbd0 logged {BLOCKS} {ROUNDS} {WRITES_PER_ROUND} {}",
            seed % 1_000_000
        ));
        self.stop();
        // In order, so that the log is whole.
        self.machine.sh("dmsetup remove logged");
        Rounds::parse(&told)
    }

    fn flaky(&mut self, target: &str) {
        let table = format!("0 $(blockdev --getsz /dev/disk/by-id/virtio-data) {target}");
        self.machine.sh(&format!(
            "dmsetup suspend --noflush --nolockfs flaky && dmsetup load flaky --table \"{table}\" && dmsetup resume flaky"
        ));
    }

    /// The disk of replica 1 fails its writes every other few seconds, then forgets them: no guest sees it, and it comes back.
    fn survive_a_flaky_disk(&mut self) {
        const SOUND: &str = "linear /dev/disk/by-id/virtio-data 0";
        let size = "$(blockdev --getsz /dev/disk/by-id/virtio-data)";
        self.machine.sh(&format!("dmsetup create flaky --table \"0 {size} {SOUND}\""));
        self.configure("flaky");
        self.start();
        self.machine.sh(
            "systemd-run --quiet --unit=load --property=KillSignal=SIGINT --property=KillMode=mixed --collect \
             fio --name=load --filename=/dev/nbd0 --size=8M --rw=randwrite --bsrange=4k-64k --ioengine=libaio \
             --iodepth=8 --direct=1 --fsync=16 --verify=crc32c --verify_backlog=64 --verify_fatal=1 \
             --verify_state_save=0 --time_based --runtime=3600 --output=/run/fio",
        );
        let reconnects = "newel status --json --volume db | grep -o '\"reconnects\":[0-9]*' | sed -n 2p";
        let before = self.machine.sh(reconnects);
        self.flaky("flakey /dev/disk/by-id/virtio-data 0 3 3 1 error_writes");
        // It was seen to fail, or this shows nothing.
        self.machine.until(&format!("test \"$({reconnects})\" != '{}'", before.trim()), SOON);
        self.flaky(SOUND);
        // After a failed write it stays away until it is started again from what is durable.
        self.machine.sh("systemctl restart newel-downstairs@db-1");
        self.await_active(3);

        // Nothing is written any more, and nobody is told; then the process dies.
        self.flaky("flakey /dev/disk/by-id/virtio-data 0 0 3600 1 drop_writes");
        wait::pass(Duration::from_secs(5));
        self.machine.sh("systemctl kill --kill-who=main --signal=KILL newel-downstairs@db-1");
        self.flaky(SOUND);
        self.await_active(3);

        self.machine.sh("systemctl is-active load && systemctl stop load");
        let report = self.machine.sh("cat /run/fio");
        assert!(report.contains("err= 0"), "{report}");
        let trouble = self.machine.run("dmesg | grep -E 'nbd0.*(I/O error|Other side returned)'");
        assert_eq!(trouble.code, 1, "{trouble}");
        self.machine.sh("newel scrub db --wait");
        self.stop();
        let mut digests = Vec::new();
        for region in ["/var/lib/newel/db-0", "/dev/mapper/flaky", "/var/lib/newel/db-2"] {
            let told = self.machine.sh(&format!("newel-downstairs check --region {region}"));
            digests.push(told.lines().find(|line| line.starts_with("digest:")).unwrap().to_owned());
        }
        assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
    }
}

#[test]
fn what_was_flushed_survives_a_loss_of_power_at_any_moment() {
    let test = "what_was_flushed_survives_a_loss_of_power_at_any_moment";
    let _turn = Heavy::take();
    let seed = seed::seed(test);
    vm::anew_if_frozen(test, || loses_power(test, seed));
}

fn loses_power(test: &str, seed: u64) {
    let machine = vm::guest(test, Suite::Bookworm, |dir| {
        vec![Disk::empty(dir, "data", DEVICE_BYTES as u64), Disk::empty(dir, "log", 1 << 30)]
    });
    let Some(machine) = machine else { return };
    let mut guest = Guest { machine };
    guest.machine.switch_on();
    vm::package::install(&mut guest.machine);
    guest.machine.put_program(vm::BLOCKS);
    guest.create_regions();
    let rounds = guest.record(seed);
    guest.survive_a_flaky_disk();
    guest.machine.power_off();
    let log = WriteLog::read(&guest.machine.dir().join("log.img"));
    check_log(&log, &rounds, seed);
}
