//! fio's job files: those built in, those of the user, and what is set in them.
//!
//! Invariants:
//! - Whatever a file says, the jobs go to the volume by the NBD engine and leave the logs that the report is made of.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

const BUILT_IN: [(&str, &str); 3] = [
    ("crucible", include_str!("../../fio/crucible.fio")),
    ("redpanda", include_str!("../../fio/redpanda.fio")),
    ("mixed", include_str!("../../fio/mixed.fio")),
];
/// A job file of people's making is far smaller.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// fio writes `hist_clat_hist.1.log` and so on beside the job file.
const LOG_PREFIX: &str = "hist";

/// Keys that decide where the jobs go and what is logged, and those that would turn off what is needed.
const SET_HERE: [&str; 20] = [
    "clat_percentiles",
    "directory",
    "disable_clat",
    "disable_lat",
    "filename",
    "filename_format",
    "group_reporting",
    "gtod_reduce",
    "hostname",
    "ioengine",
    "lat_percentiles",
    "log_compression",
    "log_hist_coarseness",
    "log_hist_msec",
    "log_store_compressed",
    "log_unix_epoch",
    "log_alternate_epoch",
    "per_job_logs",
    "uri",
    "write_hist_log",
];

#[derive(Debug)]
pub(super) struct Settings {
    pub(super) runtime_s: Option<u32>,
    pub(super) size_bytes: Option<u64>,
    pub(super) window: Duration,
}

#[derive(Debug)]
pub(super) struct JobFile {
    /// Without path and ending.
    pub(super) name: String,
    pub(super) text: String,
    pub(super) sections: Vec<String>,
}

pub(super) fn is_built_in(name: &str) -> bool {
    BUILT_IN.iter().any(|(known, _)| *known == name)
}

/// The histogram log of fio's `thread`-th thread, counted from 0.
pub(super) fn log_name(thread: usize) -> String {
    format!("{LOG_PREFIX}_clat_hist.{}.log", thread + 1)
}

impl JobFile {
    pub(super) fn load(name: &str, settings: &Settings) -> Result<Self> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return Self::prepare(name, text, settings);
        }
        let path = Path::new(name);
        let refused = || {
            let known: Vec<&str> = BUILT_IN.iter().map(|(known, _)| *known).collect();
            format!("{name:?} is neither built in ({}) nor a job file that can be read", known.join(", "))
        };
        let size = std::fs::metadata(path).with_context(refused)?.len();
        if size > FILE_BYTES_MAX {
            bail!("{name} has {size} bytes: that is no fio job file");
        }
        let text = std::fs::read_to_string(path).with_context(refused)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Self::prepare(&name, &text, settings).with_context(|| format!("job file {}", path.display()))
    }

    fn prepare(name: &str, text: &str, settings: &Settings) -> Result<Self> {
        let mut dropped: Vec<&str> = SET_HERE.into();
        let mut head = format!(
            "[global]\nioengine=nbd\nuri=${{URI}}\nclat_percentiles=1\nwrite_hist_log={LOG_PREFIX}\nlog_hist_msec={}\nlog_unix_epoch=1\n",
            settings.window.as_millis()
        );
        if let Some(seconds) = settings.runtime_s {
            dropped.extend(["runtime", "timeout", "time_based"]);
            head.push_str(&format!("time_based\nruntime={seconds}\n"));
        }
        if let Some(bytes) = settings.size_bytes {
            dropped.extend(["size", "filesize", "io_size"]);
            head.push_str(&format!("size={bytes}\n"));
        }
        let mut sections = Vec::new();
        let mut out = head;
        for line in text.lines() {
            let line = line.trim();
            if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                if !section.eq_ignore_ascii_case("global") {
                    sections.push(section.to_owned());
                }
            } else if line.split_whitespace().next() == Some("include") {
                bail!("{line:?}: other files are not followed; put what is in there into this one");
            } else if dropped.contains(&key(line).as_str()) {
                continue;
            }
            out.push_str(line);
            out.push('\n');
        }
        if sections.is_empty() {
            bail!("it has no job: a section such as [read] begins one");
        }
        Ok(Self { name: name.to_owned(), text: out, sections })
    }
}

fn key(line: &str) -> String {
    line.split('=').next().unwrap_or_default().trim().to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings { runtime_s: Some(3), size_bytes: Some(1 << 20), window: Duration::from_millis(250) }
    }

    #[test]
    fn target_and_logs_are_always_ours() {
        let text = "; a comment\n[Global]\nioengine = libaio\nfilename=/dev/sda\nruntime=60\n time_based\nSize=4g\nbs=4k\n\n\
                    [one]\nrw=read\nuri=nbd://elsewhere\ngtod_reduce=1\n[two]\nrw=write\nruntime=9\n";
        let file = JobFile::prepare("x", text, &settings()).unwrap();
        assert_eq!(file.sections, ["one", "two"]);
        let expected = "[global]\nioengine=nbd\nuri=${URI}\nclat_percentiles=1\nwrite_hist_log=hist\nlog_hist_msec=250\n\
                        log_unix_epoch=1\ntime_based\nruntime=3\nsize=1048576\n; a comment\n[Global]\nbs=4k\n\n[one]\nrw=read\n[two]\nrw=write\n";
        assert_eq!(file.text, expected);
    }

    #[test]
    fn what_is_not_set_stays() {
        let settings = Settings { runtime_s: None, size_bytes: None, ..settings() };
        for (name, text) in BUILT_IN {
            let file = JobFile::load(name, &settings).unwrap();
            for line in text.lines().filter(|line| line.starts_with("runtime=") || line.starts_with("size="))
            {
                assert!(file.text.lines().any(|kept| kept == line), "{name}: {line}");
            }
        }
        assert_eq!(JobFile::load("crucible", &settings).unwrap().sections.len(), 6);
    }

    #[test]
    fn what_is_no_job_file_is_refused() {
        let check = |text: &str, part: &str| {
            let error = format!("{:#}", JobFile::prepare("x", text, &settings()).unwrap_err());
            assert!(error.contains(part), "{error}");
        };
        check("[global]\nbs=4k\n", "has no job");
        check("include more.fio\n[a]\n", "not followed");
        let error = format!("{:#}", JobFile::load("/nowhere", &settings()).unwrap_err());
        assert!(error.contains("crucible, redpanda, mixed"), "{error}");
    }
}
