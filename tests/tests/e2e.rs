//! What guests and their tools do with a healthy volume.

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use newel_tests::command::{PATIENCE, Running, run, sh};
use newel_tests::fio;
use newel_tests::lock::Heavy;
use newel_tests::skip::{have, have_root};
use newel_tests::volume::{Setup, Volume};
use newel_tests::wait;

#[test]
fn nbdinfo_shows_the_volume() {
    if !have("nbdinfo_shows_the_volume", &["nbdinfo"]) {
        return;
    }
    let mut volume = Volume::start(Setup { tcp: true, ..Setup::default() });
    let info = sh("nbdinfo", &["--json", &volume.uri()]).ok().stdout;
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let export = &info["exports"][0];
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(export["export-size"], 256 << 20);
    assert_eq!(export["is_read_only"], false);
    for can in ["can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn"] {
        assert_eq!(export[can], true, "{can}: {export}");
    }
    let list = sh("nbdinfo", &["--list", &volume.uri()]).ok().stdout;
    assert!(list.contains("newel") || list.contains("export=\"\""), "{list}");

    let map = sh("nbdinfo", &["--map", "--totals", &volume.uri()]).ok().stdout;
    assert!(map.contains("hole,zero"), "a new volume is one hole: {map}");
    volume.stop_and_check();
}

#[test]
fn the_map_follows_writes_and_trims() {
    if !have("the_map_follows_writes_and_trims", &["nbdinfo", "qemu-io"]) {
        return;
    }
    let mut volume = Volume::small();
    let uri = volume.uri();
    qemu_io(&uri, &["write -P 0x5a 1M 64k", "discard 1088k 16k", "write -P 0x11 1152k 4k"]);
    let map = sh("nbdinfo", &["--map", &uri]).ok().stdout;
    let extents: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().collect()).collect();
    let data: u64 = extents.iter().filter(|extent| extent[3] == "data").map(|extent| number(extent[1])).sum();
    assert_eq!(data, (64 + 4) << 10, "{map}");
    assert_eq!(extents.iter().map(|extent| number(extent[1])).sum::<u64>(), 256 << 20, "{map}");
    volume.stop_and_check();
}

fn number(text: &str) -> u64 {
    text.parse().unwrap()
}

#[test]
fn qemu_io_reads_what_it_wrote() {
    if !have("qemu_io_reads_what_it_wrote", &["qemu-io"]) {
        return;
    }
    let mut volume = Volume::small();
    qemu_io(
        &volume.uri(),
        &[
            "write -P 0xa5 0 1M",
            "read -P 0xa5 0 1M",
            "write -P 0x77 513 4093",
            "read -P 0xa5 0 513",
            "read -P 0x77 513 4093",
            "read -P 0xa5 4606 1k",
            "write -z 64k 64k",
            "read -P 0 64k 64k",
            "discard 256k 128k",
            "read -P 0 256k 128k",
            "read -P 0xa5 384k 128k",
            "write -f -P 0x33 8M 512k",
            "flush",
            "read -P 0x33 8M 512k",
            "write -z -u 8M 256k",
            "read -P 0 8M 256k",
            "read -P 0x33 8448k 256k",
            "write -P 0x44 256M-4k 4k",
        ]
        .map(|command| command.replace("256M-4k", &((256 << 20) - 4096).to_string()))
        .each_ref()
        .map(String::as_str),
    );
    volume.stop_and_check();
}

fn qemu_io(uri: &str, commands: &[&str]) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", uri]);
    for text in commands {
        command.args(["-c", text]);
    }
    let ran = run(&mut command).ok();
    assert!(!ran.stdout.contains("erification failed"), "{ran}");
}

#[test]
fn a_real_file_system_image_goes_in_and_out() {
    let test = "a_real_file_system_image_goes_in_and_out";
    if !have(test, &["nbdcopy", "mke2fs", "e2fsck", "qemu-img", "sha256sum"]) {
        return;
    }
    let _heavy = Heavy::take();
    let mut volume = Volume::start(Setup { size: "1200M", ..Setup::default() });
    let image = volume.dir().join("in.img");
    let files = source_tree(volume.dir());
    let files = files.to_str().unwrap();
    let path = image.to_str().unwrap();
    sh("mke2fs", &["-q", "-t", "ext4", "-N", "200000", "-d", files, path, "1200M"]).ok();

    let uri = volume.uri();
    sh("nbdcopy", &["--flush", path, &uri]).ok();
    let out = volume.dir().join("out.img");
    let out = out.to_str().unwrap();
    sh("nbdcopy", &[&uri, out]).ok();
    assert_eq!(sha256(path), sha256(out));
    sh("e2fsck", &["-fn", out]).ok();
    std::fs::remove_file(out).unwrap();

    // The same through QEMU, out into another format and in again.
    let qcow = volume.dir().join("out.qcow2");
    let qcow = qcow.to_str().unwrap();
    sh("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, qcow]).ok();
    sh("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", path, qcow]).ok();
    sh("qemu-img", &["convert", "-n", "-f", "qcow2", "-O", "raw", qcow, &uri]).ok();
    sh("qemu-img", &["compare", "-f", "raw", "-F", "raw", path, &uri]).ok();
    volume.stop_and_check();
}

fn sha256(path: &str) -> String {
    sh("sha256sum", &[path]).ok().stdout.split(' ').next().unwrap().to_owned()
}

/// A directory with at least 500 MB of real files, and at most 900.
fn source_tree(dir: &Path) -> PathBuf {
    let megabytes = |path: &str| {
        let ran = sh("du", &["-sm", path]);
        ran.stdout.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0)
    };
    if let Some(found) =
        ["/usr/share", "/usr/lib", "/usr"].into_iter().find(|path| (500..=900).contains(&megabytes(path)))
    {
        return found.into();
    }
    let tree = dir.join("tree");
    for at in 0..600_u64 {
        let sub = tree.join(format!("d{}", at % 24));
        std::fs::create_dir_all(&sub).unwrap();
        std::fs::write(sub.join(format!("f{at}")), vec![u8::try_from(at % 251).unwrap(); 1 << 20]).unwrap();
    }
    tree
}

#[test]
fn fio_verifies_every_size_over_four_connections() {
    if !have("fio_verifies_every_size_over_four_connections", &["fio"]) {
        return;
    }
    let _heavy = Heavy::take();
    let mut volume = Volume::small();
    fio::assert_clean(run(&mut fio::verifying(&volume.uri(), "48m", &[])));
    volume.stop_and_check();
}

/// A file that stands for the volume, so that programs without NBD can use it.
struct Mounted {
    file: PathBuf,
    fuse: Option<Running>,
}

impl Mounted {
    fn new(volume: &Volume) -> Self {
        let file = volume.dir().join("volume.img");
        std::fs::write(&file, "").unwrap();
        let mut fuse = Running::start(Command::new("nbdfuse").arg(&file).arg(volume.uri()));
        wait::until("nbdfuse shows the volume", Duration::from_secs(10), || {
            assert!(fuse.running(), "nbdfuse ended: {}", fuse.stderr());
            std::fs::metadata(&file).is_ok_and(|metadata| metadata.len() > 0).then_some(())
        });
        Self { file, fuse: Some(fuse) }
    }

    fn unmount(mut self) {
        sh("umount", &[self.file.to_str().unwrap()]).ok();
        self.fuse.take().unwrap().wait(PATIENCE);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.fuse.is_some() {
            Command::new("umount").arg("-l").arg(&self.file).status().ok();
        }
    }
}

/// Makes a file system through NBD, has the kernel mount it, writes a tree, and checks it after a remount and a restart
/// of the volume.
fn check_file_system(name: &str, make: &[&str], check: &[&str]) {
    let test = format!("a_kernel_file_system_lives_on_it ({name})");
    if !have_root(&test)
        || !have(&test, &["nbdfuse", make[0], check[0], "/dev/fuse", "diff", "/dev/loop-control"])
    {
        return;
    }
    let mut volume = Volume::start(Setup { size: "512M", ..Setup::default() });
    let files = volume.dir().join("files");
    for at in 0..200_u64 {
        let sub = files.join(format!("d{}", at % 7));
        std::fs::create_dir_all(&sub).unwrap();
        let length = usize::try_from(at * 997).unwrap();
        std::fs::write(sub.join(format!("f{at}")), vec![u8::try_from(at % 251).unwrap(); length]).unwrap();
    }
    let files = files.to_str().unwrap();
    let mount = volume.dir().join("mnt");
    std::fs::create_dir(&mount).unwrap();
    let target = mount.to_str().unwrap();

    let mounted = Mounted::new(&volume);
    let file = mounted.file.to_str().unwrap().to_owned();
    let with_file = |words: &[&str]| sh(words[0], &[&words[1..], &[file.as_str()]].concat()).ok();
    with_file(make);
    sh("mount", &["-o", "loop", &file, target]).ok();
    let copied = sh("cp", &["-a", files, &format!("{target}/copy")]);
    let unmounted = sh("umount", &[target]);
    copied.ok();
    unmounted.ok();
    with_file(check);
    mounted.unmount();
    volume.stop_and_check();

    volume.again();
    let mounted = Mounted::new(&volume);
    sh("mount", &["-o", "loop,ro", &file, target]).ok();
    let same = sh("diff", &["-r", files, &format!("{target}/copy")]);
    sh("umount", &[target]).ok();
    same.ok();
    mounted.unmount();
    volume.stop_and_check();
}

#[test]
fn a_kernel_file_system_lives_on_it() {
    let _heavy = Heavy::take();
    check_file_system("ext4", &["mkfs.ext4", "-q", "-F"], &["e2fsck", "-fn"]);
    check_file_system("xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n", "-f"]);
    check_file_system("btrfs", &["mkfs.btrfs", "-q", "-f"], &["btrfs", "check"]);
}
