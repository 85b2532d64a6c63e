//! A client's connection to the provider, plain or under TLS.

use std::io::{Read, Result, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::tls::Certificates;

/// How connections are accepted.
pub(super) enum Acceptor {
    Plain,
    Tls(Arc<ServerConfig>),
}

impl Acceptor {
    /// Under TLS, with the server's certificate.
    pub(super) fn tls(certificates: &Certificates) -> Acceptor {
        let chain = CertificateDer::pem_file_iter(certificates.server_certificate()).expect("a certificate");
        let chain: Vec<_> = chain.map(|certificate| certificate.expect("a certificate")).collect();
        let key = PrivateKeyDer::from_pem_file(certificates.server_key()).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = versions.expect("versions").with_no_client_auth().with_single_cert(chain, key);
        Acceptor::Tls(Arc::new(config.expect("a certificate and its key")))
    }

    /// The handshake comes with the first read.
    pub(super) fn accept(&self, socket: TcpStream) -> Result<Stream> {
        match self {
            Acceptor::Plain => Ok(Stream::Plain(socket)),
            Acceptor::Tls(config) => {
                let connection = ServerConnection::new(config.clone()).map_err(std::io::Error::other)?;
                Ok(Stream::Tls(Box::new(StreamOwned::new(connection, socket))))
            }
        }
    }
}

/// A client's connection.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ServerConnection, TcpStream>>),
}

impl Stream {
    pub(super) fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(stream) => &stream.sock,
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(bytes),
            Stream::Tls(stream) => stream.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        match self {
            Stream::Plain(socket) => socket.write(bytes),
            Stream::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> Result<()> {
        match self {
            Stream::Plain(socket) => socket.flush(),
            Stream::Tls(stream) => stream.flush(),
        }
    }
}
