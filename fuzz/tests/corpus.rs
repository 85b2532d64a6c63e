//! Replays the corpus: what was written by hand to show each target its forms, and what a fuzzer has found.

use std::fs;
use std::path::Path;

use tollgate_fuzz::TARGETS;

#[test]
fn every_input_keeps_its_promises() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, target) in TARGETS {
        let mut inputs = 0;
        for entry in fs::read_dir(corpus.join(name)).unwrap_or_else(|error| panic!("corpus/{name}: {error}"))
        {
            let path = entry.expect("an entry").path();
            let bytes = fs::read(&path).expect("a file");
            // Cut and changed a little, each is many: what is almost right goes deepest.
            for end in 0..=bytes.len() {
                target(&bytes[..end]);
            }
            for at in 0..bytes.len() {
                for other in [0, b'%', b':', b'"', b'\n', 0xff, bytes[at] ^ 1] {
                    let mut changed = bytes.clone();
                    changed[at] = other;
                    target(&changed);
                }
            }
            inputs += 1;
        }
        assert!(inputs >= 3, "{name} has {inputs} inputs");
    }
}

#[test]
fn every_target_has_its_program_and_its_corpus() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names = |directory: &str| {
        let entries = fs::read_dir(here.join(directory)).expect("a directory");
        let stem = |path: &Path| path.file_stem().expect("a name").to_string_lossy().into_owned();
        let mut names: Vec<String> = entries.map(|entry| stem(&entry.expect("an entry").path())).collect();
        names.sort();
        names
    };
    let targets = TARGETS.map(|(name, _)| name.to_owned());
    assert_eq!(names("fuzz_targets"), targets);
    assert_eq!(names("corpus"), targets);
}
