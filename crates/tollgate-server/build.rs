//! Compiles the proto files of Envoy's service: messages, service and client, and the descriptors for reflection.

use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).open_file("envoy/service/ratelimit/v3/rls.proto")?;
    std::fs::write(out.join("envoy.descriptors"), compiler.encode_file_descriptor_set())?;
    tonic_prost_build::configure().include_file("envoy.rs").compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
