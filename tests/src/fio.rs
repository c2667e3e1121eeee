//! fio against a volume.

use std::process::Command;

use crate::command::Ran;

/// fio with the NBD engine; `arguments` say the rest.
pub fn fio(uri: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=load", "--ioengine=nbd", &format!("--uri={uri}"), "--thread", "--group_reporting"]);
    // Else it leaves files behind where it runs.
    command.args(["--output-format=json", "--verify_state_save=0"]).args(arguments);
    command
}

/// Random reads and writes of 512 bytes to 128 KiB over four connections, each in its own 64 MiB, that are all read back
/// and compared. `size` is per connection.
pub fn verifying(uri: &str, size: &str, more: &[&str]) -> Command {
    let size = format!("--size={size}");
    let mut arguments = vec!["--rw=randrw", "--bsrange=512-128k", "--iodepth=32", "--numjobs=4", &size];
    arguments.extend(["--offset_increment=64m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1"]);
    arguments.extend(more);
    fio(uri, &arguments)
}

/// It ended well, without a single error, and did read and write.
#[track_caller]
pub fn assert_clean(ran: Ran) {
    let ran = ran.ok();
    // Warnings come before the report.
    let json = ran.stdout.find("\n{").map_or(ran.stdout.as_str(), |at| &ran.stdout[at..]);
    let report: serde_json::Value =
        serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {ran}"));
    let job = &report["jobs"][0];
    assert_eq!(job["error"], 0, "{ran}");
    assert_eq!(job["total_err"].as_u64().unwrap_or(0), 0, "{ran}");
    for direction in ["read", "write"] {
        assert!(job[direction]["total_ios"].as_u64().is_some_and(|count| count > 0), "no {direction}: {ran}");
    }
}
