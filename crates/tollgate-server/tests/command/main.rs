//! The binary as people call it: arguments in; exit code, stdout, stderr and files out.

mod bad_input;
mod bench;
mod binary;
mod combined;
mod formats;
mod golden;
mod import;
mod jobs;
mod order;
mod output;
mod page;
mod targets;
mod validate;
