//! Certificates for tests: an authority, a server, a client, and a stranger whom nobody trusts.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use tempfile::TempDir;

/// PEM files in a directory of their own, which goes away with this. Keys are readable by their owner alone.
pub struct Certificates {
    dir: TempDir,
}

impl Certificates {
    /// Makes fresh ones. The server's is valid for `localhost` and `127.0.0.1`, the client's is made out to `tollgate`.
    pub fn generate() -> Certificates {
        let certificates = TempDir::with_prefix("tollgate-tls-").map(|dir| Certificates { dir });
        let certificates =
            certificates.unwrap_or_else(|error| panic!("no directory for certificates: {error}"));
        certificates.fill().unwrap_or_else(|error| panic!("cannot make certificates: {error}"));
        certificates
    }

    fn fill(&self) -> Result<(), Box<dyn std::error::Error>> {
        let ours = authority("Tollgate test authority")?;
        self.write(&self.authority(), &ours.pem())?;
        self.write(&self.other_authority(), &authority("An unrelated authority")?.pem())?;
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let server = signed(&ours, names, "localhost", ExtendedKeyUsagePurpose::ServerAuth)?;
        self.write(&self.server_certificate(), &server.0)?;
        self.write(&self.server_key(), &server.1)?;
        let client = signed(&ours, Vec::new(), "tollgate", ExtendedKeyUsagePurpose::ClientAuth)?;
        self.write(&self.client_certificate(), &client.0)?;
        self.write(&self.client_key(), &client.1)?;
        Ok(())
    }

    fn write(&self, path: &Path, text: &str) -> std::io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(text.as_bytes())
    }

    /// The certificate of the authority that signed the server's and the client's.
    pub fn authority(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// The certificate of an authority that signed neither: a client that trusts only this one must refuse the server.
    pub fn other_authority(&self) -> PathBuf {
        self.dir.path().join("other-ca.pem")
    }

    /// The server's certificate.
    pub fn server_certificate(&self) -> PathBuf {
        self.dir.path().join("server.pem")
    }

    /// The server's private key.
    pub fn server_key(&self) -> PathBuf {
        self.dir.path().join("server.key")
    }

    /// The client's certificate.
    pub fn client_certificate(&self) -> PathBuf {
        self.dir.path().join("client.pem")
    }

    /// The client's private key.
    pub fn client_key(&self) -> PathBuf {
        self.dir.path().join("client.key")
    }
}

fn authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    CertifiedIssuer::self_signed(params, KeyPair::generate()?)
}

/// A certificate and its key, as PEM.
fn signed(
    issuer: &CertifiedIssuer<'static, KeyPair>,
    names: Vec<String>,
    common_name: &str,
    purpose: ExtendedKeyUsagePurpose,
) -> Result<(String, String), rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![purpose];
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    Ok((params.signed_by(&key, issuer)?.pem(), key.serialize_pem()))
}
