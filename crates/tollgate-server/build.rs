//! Compiles the proto files of Envoy's service: messages, service and client, and the descriptors for reflection.

use std::error::Error;
use std::path::PathBuf;

use prost_types::DescriptorProto;
use prost_types::field_descriptor_proto::Type;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).open_file("envoy/service/ratelimit/v3/rls.proto")?;
    std::fs::write(out.join("envoy.descriptors"), compiler.encode_file_descriptor_set())?;
    let mut files = compiler.file_descriptor_set();
    for file in &mut files.file {
        file.message_type.iter_mut().for_each(read_as_bytes);
    }
    tonic_prost_build::configure().include_file("envoy.rs").compile_fds(files)?;
    Ok(())
}

/// Has the texts of a call be read as bytes, which are the same on the wire. Envoy copies headers of a request into them without a
/// look at their encoding, and a text that is not UTF-8 would end the call inside the decoder, undecided and uncounted. Whoever
/// asks by reflection still sees the published types.
fn read_as_bytes(message: &mut DescriptorProto) {
    let texts: &[&str] = match message.name() {
        "RateLimitRequest" => &["domain"],
        "Entry" => &["key", "value"],
        _ => &[],
    };
    for field in &mut message.field {
        if texts.contains(&field.name()) {
            field.set_type(Type::Bytes);
        }
    }
    message.nested_type.iter_mut().for_each(read_as_bytes);
}
