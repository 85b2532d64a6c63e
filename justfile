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

# Kills job workers and their database at fifty random moments, and fails if a promise is broken.
job-kills:
    TOLLGATE_KILLS=50 cargo test -p tollgate-jobs --test scenarios kills:: -- --nocapture

# Line coverage of the kernel (100 % is asked for) and of the library (90 %).
coverage:
    rustup component add llvm-tools
    cargo install cargo-llvm-cov --locked
    PROPTEST_CASES=200 cargo llvm-cov -p tollgate-kernel --lib --tests --fail-under-lines 100
    PROPTEST_CASES=200 cargo llvm-cov -p tollgate -p tollgate-store --all-features --lib --tests --ignore-filename-regex 'tollgate-kernel' --fail-under-lines 90
