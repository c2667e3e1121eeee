//! Where the daemons' programs are: beside `newel` itself.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

#[derive(Debug)]
pub(super) struct Programs {
    pub(super) downstairs: PathBuf,
    pub(super) upstairs: PathBuf,
}

impl Programs {
    pub(super) fn find() -> Result<Self> {
        let own = std::env::current_exe().context("cannot tell where this program is")?;
        let beside = |name: &str| {
            let path = own.with_file_name(name);
            if !path.is_file() {
                bail!(
                    "{} is missing: build all programs with `cargo build --release`, or install them into one directory",
                    path.display()
                );
            }
            Ok(path)
        };
        Ok(Self { downstairs: beside("newel-downstairs")?, upstairs: beside("newel-upstairs")? })
    }
}
