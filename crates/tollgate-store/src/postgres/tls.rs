//! TLS to the server: the certificate and the name are always verified.
//!
//! Builds the connector from the options (`options.rs`) once; `pool.rs` uses it for every connection. There is no option to skip the
//! verification.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::options::{PostgresTls, missing};
use crate::{Failure, StoreError};

/// The TLS connector for these options.
pub(super) fn connector(options: &PostgresTls) -> Result<MakeRustlsConnect, StoreError> {
    let refused = |message: String| StoreError::failed(Failure::Refused, message);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| refused(format!("TLS to PostgreSQL: {error}")))?
        .with_root_certificates(roots(options)?);
    let config = match (&options.client_cert_file, &options.client_key_file) {
        (Some(cert), Some(key)) => {
            let certs = certificates("store.postgres.tls.client_cert_file", cert)?;
            let key_der = PrivateKeyDer::from_pem_file(key).map_err(|error| {
                missing(format!("store.postgres.tls.client_key_file = {}", key.display()), error)
            })?;
            builder.with_client_auth_cert(certs, key_der).map_err(|error| {
                refused(format!("store.postgres.tls: the client certificate and key do not fit: {error}"))
            })?
        }
        _ => builder.with_no_client_auth(),
    };
    Ok(MakeRustlsConnect::new(config))
}

/// The trusted authorities: the one in the options, or those that the machine trusts.
fn roots(options: &PostgresTls) -> Result<RootCertStore, StoreError> {
    let mut roots = RootCertStore::empty();
    match &options.ca_file {
        Some(file) => {
            for certificate in certificates("store.postgres.tls.ca_file", file)? {
                roots.add(certificate).map_err(|error| {
                    missing(format!("store.postgres.tls.ca_file = {}", file.display()), error)
                })?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        return Err(StoreError::failed(
            Failure::Refused,
            "TLS to PostgreSQL: nobody is trusted on this machine; name store.postgres.tls.ca_file",
        ));
    }
    Ok(roots)
}

fn certificates(field: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>, StoreError> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let wrong = |cause: String| missing(format!("{field} = {}", file.display()), cause);
    match read {
        Ok(certificates) if certificates.is_empty() => Err(wrong("holds no certificate".into())),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(wrong(error.to_string())),
    }
}
