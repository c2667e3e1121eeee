//! How guests are served: `[nbd]`, `[nbd.tls]` and their flags.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Deserialize;

use super::duration_within;
use crate::shell::nbd::{NbdOptions, TlsFiles, TlsOffer};

/// Each connection of a guest has up to three descriptors; these and the handshakes stay below what the unit allows.
const CONNECTIONS_MAX: usize = 8192;
const HANDSHAKES_MAX: usize = 8192;
const HANDSHAKE_MAX: Duration = Duration::from_secs(600);
/// Below this a guest that merely thinks would be cut off.
const IDLE_MIN: Duration = Duration::from_secs(1);
const IDLE_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

#[derive(Args, Clone, Debug, Default)]
pub(super) struct NbdArgs {
    /// Whether guests may or must speak TLS; on unix sockets they never must [default: required if there is a certificate]
    #[arg(long, value_enum, value_name = "MODE")]
    tls: Option<TlsMode>,
    /// The server's certificate in PEM, and behind it those that lead up to its CA
    #[arg(long, value_name = "FILE")]
    tls_certificate: Option<PathBuf>,
    /// Its private key in PEM
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Let in only guests with a certificate of this CA, in PEM
    #[arg(long, value_name = "FILE")]
    tls_client_ca: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum TlsMode {
    Off,
    Offered,
    Required,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NbdTable {
    connections: Option<usize>,
    handshakes: Option<usize>,
    handshake: Option<String>,
    idle: Option<String>,
    #[serde(default)]
    tls: TlsTable,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsTable {
    mode: Option<TlsMode>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
}

/// How to serve the volume of this name.
pub(super) fn options(name: &str, args: NbdArgs, file: NbdTable) -> Result<NbdOptions> {
    let mut options = NbdOptions::new(name);
    let counts = [
        ("connections", file.connections, &mut options.connections_max, CONNECTIONS_MAX),
        ("handshakes", file.handshakes, &mut options.handshakes_max, HANDSHAKES_MAX),
    ];
    for (key, given, place, high) in counts {
        let value = given.unwrap_or(*place);
        if !(1..=high).contains(&value) {
            bail!("nbd.{key} = {value}: it must lie between 1 and {high}");
        }
        *place = value;
    }
    if let Some(text) = &file.handshake {
        options.handshake_limit =
            duration_within("nbd.handshake", text, Duration::from_millis(100), HANDSHAKE_MAX)?;
    }
    options.idle_limit = match file.idle.as_deref() {
        None | Some("never") => None,
        Some(text) => Some(duration_within("nbd.idle", text, IDLE_MIN, IDLE_MAX)?),
    };
    options.tls = tls(args, file.tls)?;
    Ok(options)
}

fn tls(args: NbdArgs, file: TlsTable) -> Result<Option<TlsOffer>> {
    let certificate = args.tls_certificate.or(file.certificate);
    let key = args.tls_key.or(file.key);
    let client_ca = args.tls_client_ca.or(file.client_ca);
    let any = certificate.is_some() || key.is_some() || client_ca.is_some();
    let required = match args.tls.or(file.mode) {
        Some(TlsMode::Off) => return Ok(None),
        None if !any => return Ok(None),
        Some(TlsMode::Offered) => false,
        Some(TlsMode::Required) | None => true,
    };
    let Some(certificate) = certificate else {
        bail!(
            "tls.certificate is missing: TLS needs a certificate and its key (--tls-certificate, --tls-key)"
        )
    };
    let Some(key) = key else {
        bail!("tls.key is missing: it is the private key of {}", certificate.display())
    };
    Ok(Some(TlsOffer::load(&TlsFiles { certificate, key, client_ca }, required)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<NbdOptions> {
        options("v", NbdArgs::default(), toml::from_str(text)?)
    }

    fn fails(text: &str, needle: &str) {
        let error = format!("{:#}", check(text).unwrap_err());
        assert!(error.contains(needle), "{text:?}: {error}");
    }

    #[test]
    fn bounds_have_defaults_and_limits() {
        let defaults = check("").unwrap();
        assert_eq!((defaults.connections_max, defaults.handshakes_max), (256, 128));
        assert_eq!((defaults.handshake_limit, defaults.idle_limit), (Duration::from_secs(10), None));
        let given = check("connections = 3\nhandshakes = 4\nhandshake = \"2s\"\nidle = \"1h\"\n").unwrap();
        assert_eq!((given.connections_max, given.handshakes_max), (3, 4));
        assert_eq!(
            (given.handshake_limit, given.idle_limit),
            (Duration::from_secs(2), Some(Duration::from_secs(3600)))
        );
        assert_eq!(check("idle = \"never\"\n").unwrap().idle_limit, None);
        fails("connections = 0\n", "nbd.connections = 0: it must lie between 1 and");
        fails("handshakes = 100000\n", "nbd.handshakes = 100000");
        fails("handshake = \"1h\"\n", "nbd.handshake = \"1h\"");
        fails("idle = \"1ms\"\n", "nbd.idle = \"1ms\"");
        fails("idel = \"1s\"\n", "unknown field `idel`");
    }

    #[test]
    fn tls_needs_a_certificate_and_a_key() {
        assert!(check("[tls]\nmode = \"off\"\ncertificate = \"/none\"\n").unwrap().tls.is_none());
        for mode in ["offered", "required"] {
            fails(&format!("[tls]\nmode = \"{mode}\"\n"), "tls.certificate is missing");
        }
        fails("[tls]\nkey = \"/k\"\n", "tls.certificate is missing");
        fails("[tls]\ncertificate = \"/c\"\n", "tls.key is missing: it is the private key of /c");
        fails(
            "[tls]\ncertificate = \"/none/c\"\nkey = \"/none/k\"\n",
            "can't read the TLS certificate file /none/c",
        );
        fails("[tls]\nmode = \"maybe\"\n", "unknown variant `maybe`");
    }
}
