//! Notes the compiler's version, because numbers without it cannot be compared, and compiles the proto files of Envoy's service
//! for the one that answers always the same.

use std::error::Error;
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=RUSTC");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().ok();
    let version = version.and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
    println!("cargo::rustc-env=RUSTC_VERSION={}", version.trim());

    let protos = "../crates/tollgate-server/proto";
    println!("cargo::rerun-if-changed={protos}");
    let mut compiler = protox::Compiler::new([protos])?;
    compiler.include_imports(true).open_file("envoy/service/ratelimit/v3/rls.proto")?;
    tonic_prost_build::configure().include_file("envoy.rs").compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
