//! Certificates for tests, in files named as libnbd and QEMU expect them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;

use crate::shell::nbd::{TlsFiles, TlsOffer};

/// A CA, a server and a client of it.
pub(super) struct Pki {
    dir: TempDir,
}

impl Pki {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut params = named("Newel test CA", &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.path().join("ca-cert.pem"), ca.pem()).unwrap();
        for (role, names, usage) in [
            ("server", &["localhost", "127.0.0.1"][..], ExtendedKeyUsagePurpose::ServerAuth),
            ("client", &[], ExtendedKeyUsagePurpose::ClientAuth),
        ] {
            let mut params = named(&format!("Newel test {role}"), names);
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
            params.extended_key_usages = vec![usage];
            params.use_authority_key_identifier_extension = true;
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &ca).unwrap();
            std::fs::write(dir.path().join(format!("{role}-cert.pem")), certificate.pem()).unwrap();
            std::fs::write(dir.path().join(format!("{role}-key.pem")), key.serialize_pem()).unwrap();
        }
        Self { dir }
    }

    pub(super) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(super) fn files(&self, client_ca: bool) -> TlsFiles {
        TlsFiles {
            certificate: self.file("server-cert.pem"),
            key: self.file("server-key.pem"),
            client_ca: client_ca.then(|| self.file("ca-cert.pem")),
        }
    }

    pub(super) fn offered(&self) -> TlsOffer {
        TlsOffer::load(&self.files(false), false).unwrap()
    }

    pub(super) fn required(&self) -> TlsOffer {
        TlsOffer::load(&self.files(false), true).unwrap()
    }

    /// A client that trusts this CA, and shows a certificate of `identity`, if given.
    pub(super) fn client(&self, identity: Option<&Self>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(certificate(&self.file("ca-cert.pem"))).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        Arc::new(match identity {
            None => builder.with_no_client_auth(),
            Some(pki) => {
                let key = PrivateKeyDer::from_pem_file(pki.file("client-key.pem")).unwrap();
                builder.with_client_auth_cert(vec![certificate(&pki.file("client-cert.pem"))], key).unwrap()
            }
        })
    }
}

fn certificate(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).unwrap()
}

fn named(name: &str, hosts: &[&str]) -> CertificateParams {
    let hosts: Vec<String> = hosts.iter().map(|&host| host.to_owned()).collect();
    let mut params = CertificateParams::new(hosts).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}
