//! The Debian package, as dpkg sees it. (`vm.rs` installs it.)

#![expect(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::path::{Path, PathBuf};

use newel_tests::command::{bin_dir, program, sh, temp_dir};
use newel_tests::skip::have;

const PROGRAMS: [&str; 3] = ["newel", "newel-upstairs", "newel-downstairs"];

fn build(into: &Path) -> PathBuf {
    for name in PROGRAMS {
        program(name);
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/package.sh");
    let programs = bin_dir();
    let built = sh(script, &["-b", programs.to_str().unwrap(), "-o", into.to_str().unwrap()]).ok();
    PathBuf::from(built.stdout.trim())
}

#[test]
fn the_package_holds_what_it_should_and_nothing_odd() {
    let test = "the_package_holds_what_it_should_and_nothing_odd";
    if !have(test, &["dpkg-deb", "dpkg-shlibdeps", "strip", "readelf", "gzip", "md5sum", "bash"]) {
        return;
    }
    let dir = temp_dir();
    let package = build(dir.path());
    let package = package.to_str().unwrap();
    let field = |name: &str| sh("dpkg-deb", &["--field", package, name]).ok().stdout.trim().to_owned();
    assert_eq!(field("Version"), env!("CARGO_PKG_VERSION"));
    assert!(field("Depends").contains("libc6 (>="), "{}", field("Depends"));

    let listing = sh("dpkg-deb", &["--contents", package]).ok().stdout;
    for line in listing.lines() {
        let mode = line.split(' ').next().unwrap();
        assert!(line.contains(" root/root "), "not root's: {line}");
        let sound = match mode.as_bytes()[0] {
            b'd' => mode == "drwxr-xr-x",
            _ if line.contains(" ./usr/bin/") || line.ends_with(".sh") => mode == "-rwxr-xr-x",
            _ => mode == "-rw-r--r--",
        };
        assert!(sound, "of odd mode: {line}");
    }

    let root = dir.path().join("root");
    sh("dpkg-deb", &["--raw-extract", package, root.to_str().unwrap()]).ok();
    for path in [
        "usr/lib/systemd/system/newel-attach@.service",
        "usr/lib/systemd/system/newel-downstairs@.service",
        "usr/lib/systemd/system/newel-upstairs@.service",
        "usr/lib/systemd/system/newel-replicas.target",
        "usr/lib/sysusers.d/newel.conf",
        "usr/lib/tmpfiles.d/newel.conf",
        "usr/share/man/man1/newel-attach.1.gz",
        "usr/share/man/man1/newel-downstairs-create.1.gz",
        "usr/share/man/man1/newel-upstairs-run.1.gz",
        "usr/share/doc/newel/copyright",
        "usr/share/newel/grafana/alerts.yml",
        "usr/share/newel/grafana/newel.json",
        "usr/share/newel/trace/jobs.sh",
        "usr/share/newel/trace/outliers.bt",
        "etc/newel/attach",
        "etc/newel/downstairs",
        "etc/newel/upstairs",
    ] {
        assert!(root.join(path).exists(), "{path} is missing in {listing}");
    }
    for name in PROGRAMS {
        let installed = root.join("usr/bin").join(name);
        let version = sh(installed.to_str().unwrap(), &["--version"]).ok().stdout;
        assert_eq!(version.trim(), format!("{name} {}", env!("CARGO_PKG_VERSION")));
        // What tracers look for is not stripped.
        let notes = sh("readelf", &["-n", installed.to_str().unwrap()]).ok().stdout;
        assert!(name == "newel" || notes.contains("stapsdt"), "{name}: {notes}");
        let completions = root.join("usr/share/bash-completion/completions").join(name);
        sh("bash", &["-n", completions.to_str().unwrap()]).ok();
    }
    for script in ["postinst", "prerm", "postrm"] {
        sh("sh", &["-n", root.join("DEBIAN").join(script).to_str().unwrap()]).ok();
    }
    let check = format!("cd {} && md5sum --check --quiet DEBIAN/md5sums", root.display());
    sh("sh", &["-c", &check]).ok();

    // The example is one: what is wrong with it is only that the region isn't there.
    let example = root.join("usr/share/doc/newel/examples/downstairs.toml");
    let text = std::fs::read_to_string(example).unwrap();
    assert!(text.contains("10.0.0.1:7100"), "{text}");
    let here = dir.path().join("example.toml");
    std::fs::write(&here, text.replace("10.0.0.1:7100", "127.0.0.1:0")).unwrap();
    let replica = root.join("usr/bin/newel-downstairs");
    sh(replica.to_str().unwrap(), &["run", "--config", here.to_str().unwrap()])
        .failed_saying(&["/var/lib/newel/NAME"]);
}

#[test]
fn the_same_programs_give_the_same_package() {
    if !have("the_same_programs_give_the_same_package", &["dpkg-deb", "dpkg-shlibdeps", "strip", "gzip"]) {
        return;
    }
    let (one, other) = (temp_dir(), temp_dir());
    let (first, second) = (build(one.path()), build(other.path()));
    assert!(std::fs::read(first).unwrap() == std::fs::read(second).unwrap(), "they differ");
}
