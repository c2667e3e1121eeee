//! TLS for guests: what is read at the start, and the two halves of an encrypted stream.
//!
//! Invariants:
//! - Files are read once, at the start, and whatever is wrong with one is told then, with its path.
//! - With a client CA nobody gets past the handshake of TLS without a certificate of that CA.
//! - Nothing outlives a connection: no tickets are given out, no sessions kept.
//! - Of what is to be sent rustls takes 64 KiB at most; the rest waits in the connection's own queue, under its bounds.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use newel_protocol::nbd::Tls;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{InconsistentKeys, RootCertStore, ServerConfig};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, Join, ReadBuf};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::accept::{GuestRead, Socket};

/// Where certificate and key lie, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, and behind it those that lead up to its CA, if there are any in between.
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// Whose certificates guests must show. Without it TLS hides the data, but lets everybody in.
    pub client_ca: Option<PathBuf>,
}

/// What guests are offered.
#[derive(Clone, Debug)]
pub struct TlsOffer {
    config: Arc<ServerConfig>,
    /// On TCP nothing goes on in the clear. A unix socket is guarded by its file, and only offers TLS.
    pub required: bool,
    /// Guests must show a certificate, too.
    authenticated: bool,
}

#[derive(Debug, Error)]
pub enum TlsError {
    #[error("can't read the TLS {what} file {}: {source}", path.display())]
    Read { what: &'static str, path: PathBuf, source: io::Error },
    #[error("the TLS {what} file {} can't be used: {source}; it must hold a {what} in PEM", path.display())]
    Pem { what: &'static str, path: PathBuf, source: pem::Error },
    #[error("the TLS key {} doesn't belong to the certificate {}", key.display(), certificate.display())]
    Mismatch { certificate: PathBuf, key: PathBuf },
    #[error("the TLS certificate {} with the key {} can't be used: {source}", certificate.display(), key.display())]
    Pair { certificate: PathBuf, key: PathBuf, source: rustls::Error },
    #[error("a certificate in the TLS client CA file {} can't be used: {source}", path.display())]
    Ca { path: PathBuf, source: rustls::Error },
    #[error("the TLS client CA file {} can't be used: {source}", path.display())]
    Verifier { path: PathBuf, source: VerifierBuilderError },
}

impl TlsOffer {
    /// Reads the files.
    pub fn load(files: &TlsFiles, required: bool) -> Result<Self, TlsError> {
        let TlsFiles { certificate, key, .. } = files;
        let chain = certificates("certificate", certificate)?;
        let private = read("key", key).and_then(|text| {
            PrivateKeyDer::from_pem_slice(&text).map_err(|source| bad("key", key, source))
        })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let pair = |source| {
            let (certificate, key) = (certificate.clone(), key.clone());
            if source == rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) {
                TlsError::Mismatch { certificate, key }
            } else {
                TlsError::Pair { certificate, key, source }
            }
        };
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(pair)?;
        let builder = match &files.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(path)?), provider)
                    .build()
                    .map_err(|source| TlsError::Verifier { path: path.clone(), source })?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain, private).map_err(pair)?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), required, authenticated: files.client_ca.is_some() })
    }

    /// For the log.
    pub fn describe(offer: Option<&Self>) -> &'static str {
        match offer {
            None => "off",
            Some(Self { required: false, authenticated: false, .. }) => "offered to everybody",
            Some(Self { required: false, authenticated: true, .. }) => "offered to clients of the CA",
            Some(Self { required: true, authenticated: false, .. }) => "required, and everybody gets in",
            Some(Self { required: true, authenticated: true, .. }) => "required, of clients of the CA",
        }
    }

    /// What a guest on this socket is told.
    pub(super) fn on(offer: Option<&Self>, socket: &Socket) -> Tls {
        match (offer, socket) {
            (None, _) => Tls::Off,
            (Some(offer), Socket::Tcp(_)) if offer.required => Tls::Required,
            (Some(_), Socket::Tcp(_) | Socket::Unix(_)) => Tls::Offered,
        }
    }

    pub(super) async fn accept<R, W>(&self, read: R, write: W) -> io::Result<Encrypted<R, W>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let acceptor = TlsAcceptor::from(Arc::clone(&self.config));
        Ok(Encrypted(RefCell::new(acceptor.accept(tokio::io::join(read, write)).await?)))
    }
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { what, path: path.to_owned(), source })
}

fn bad(what: &'static str, path: &Path, source: pem::Error) -> TlsError {
    TlsError::Pem { what, path: path.to_owned(), source }
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(what, path)?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<_, _>>()
        .map_err(|source| bad(what, path, source))?;
    if found.is_empty() {
        return Err(bad(what, path, pem::Error::NoItemsFound));
    }
    Ok(found)
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("client CA certificate", path)? {
        roots.add(certificate).map_err(|source| TlsError::Ca { path: path.to_owned(), source })?;
    }
    Ok(roots)
}

/// One encrypted stream. Its halves are used by one task, never at the same time.
pub(super) struct Encrypted<R, W>(RefCell<TlsStream<Join<R, W>>>);

pub(super) struct TlsReader<'a, R, W>(&'a Encrypted<R, W>);

pub(super) struct TlsWriter<'a, R, W>(&'a Encrypted<R, W>);

impl<R, W> Encrypted<R, W> {
    pub(super) fn split(&self) -> (TlsReader<'_, R, W>, TlsWriter<'_, R, W>) {
        (TlsReader(self), TlsWriter(self))
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> AsyncRead for TlsReader<'_, R, W> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.0.borrow_mut()).poll_read(context, buffer)
    }
}

impl<R: GuestRead, W: AsyncWrite + Unpin> GuestRead for TlsReader<'_, R, W> {
    fn has_left(&self) -> bool {
        self.0.0.borrow().get_ref().0.reader().has_left()
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> AsyncWrite for TlsWriter<'_, R, W> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.0.borrow_mut()).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.0.borrow_mut()).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.0.borrow_mut()).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.0.borrow_mut()).poll_shutdown(context)
    }
}
