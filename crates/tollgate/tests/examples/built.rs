//! Examples that were built beside a test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;
use std::{env, fs};

/// One of these examples, which are built together with these features. `cargo test` does that by itself; `cargo test --tests`
/// and the like do not, and then it is done here, once and before any of them is run.
pub(crate) fn built(examples: &[&str], features: &str, name: &str) -> PathBuf {
    static BUILD: Once = Once::new();
    let this = env::current_exe().expect("a test knows where it is");
    let folder = this.parent().and_then(Path::parent).expect("tests are built two folders down");
    let path = |name: &str| folder.join("examples").join(format!("{name}{}", env::consts::EXE_SUFFIX));
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let changed = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    let is_stale = |name: &&str| changed(&path(name)) < changed(&sources.join(format!("{name}.rs")));
    BUILD.call_once(|| {
        if examples.iter().any(is_stale) {
            build(folder, examples, features);
        }
    });
    path(name)
}

fn build(folder: &Path, examples: &[&str], features: &str) {
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => "test",
        Some(profile) => profile,
    };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "build",
        "--quiet",
        "--package",
        env!("CARGO_PKG_NAME"),
        "--profile",
        profile,
        "--features",
        features,
    ]);
    cargo.args(examples.iter().flat_map(|name| ["--example", name]));
    cargo.arg("--target-dir").arg(folder.parent().expect("a profile is a folder of the target"));
    assert!(cargo.status().expect("cargo is there").success(), "the examples do not build");
}
