# A convenience, never a prerequisite: each recipe is one line that works without `just`.

# All tests, as CI runs them.
test:
    ./test

# The tests alone, with fewer random cases.
quick:
    ./test quick

# Counts of the source tree, beside those of another revision.
tree revision="HEAD":
    cargo run -p tollgate --example tree {{revision}}

# Us and our peers in one run.
bench:
    cargo run --release -p tollgate-benches -- in-process

# The scenarios of jobs with the counts and times of docs/testing.md, for a machine that does nothing else.
job-scenarios:
    TOLLGATE_JOBS_FULL=1 cargo test --release -p tollgate-jobs --all-features --test scenarios -- s0 s1 s2 --test-threads 1 --nocapture

# Kills job workers and their database at fifty random moments, and fails if a promise is broken.
job-kills:
    TOLLGATE_KILLS=50 cargo test -p tollgate-jobs --test scenarios kills:: -- --nocapture

# Line coverage: kernel, keys and headers 100 %, library 90 %; fails below, and names the lines.
coverage:
    ./coverage

# Fuzzes what strangers send, guided by the branches that are taken; needs a C++ compiler.
fuzz seconds="60":
    ./fuzz/run {{seconds}}

# Two hours of a server on Redis under load, reloads and faults; fails where memory or latency grows.
soak hours="2":
    cargo run --release -p tollgate-benches -- soak --hours {{hours}} --json soak.json --svg soak.svg

# What may be depended on: deny.toml. `cargo deny check` reads it too, and adds advisories.
deny:
    cargo test -p tollgate --features config --test dependencies

# The same file and the advisories, by cargo-deny. Fails where it is not installed.
advisories:
    cargo deny --version >/dev/null 2>&1 || { echo "cargo-deny is not installed: cargo install cargo-deny --locked --version 0.20.2" >&2; exit 1; }; cargo deny check

# Mutants of the kernel, one part of twelve: docs/testing.md.
mutants part="0/12":
    cargo install cargo-mutants --locked --version 27.1.0
    PROPTEST_CASES=40 CARGO_PROFILE_TEST_OPT_LEVEL=0 cargo mutants -p tollgate-kernel --sharding round-robin --shard {{part}} --timeout 30 -- --lib --tests

# Mutants of the engine, one part of twelve. The tests are the library's own and tests/library, which need no service.
mutants-engine part="0/12":
    cargo install cargo-mutants --locked --version 27.1.0
    PROPTEST_CASES=40 CARGO_PROFILE_TEST_OPT_LEVEL=0 cargo mutants -p tollgate --file 'crates/tollgate/src/engine*' --file 'crates/tollgate/src/engine/**' --sharding round-robin --shard {{part}} --timeout 120 -- --lib --test library
