//! `tollgate_fuzz::descriptors`, for libFuzzer.
#![cfg_attr(all(fuzzing, feature = "libfuzzer"), no_main)]

#[cfg(all(fuzzing, feature = "libfuzzer"))]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_fuzz::descriptors(bytes));

#[cfg(not(all(fuzzing, feature = "libfuzzer")))]
fn main() {}
