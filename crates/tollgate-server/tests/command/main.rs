//! The binary as people call it: arguments in; exit code, stdout, stderr and files out.

mod bad_input;
mod bench;
mod binary;
mod combined;
mod compare;
mod formats;
mod golden;
mod import;
mod inputs;
mod jobs;
mod order;
mod output;
mod page;
mod peaks;
mod suggest;
mod targets;
mod validate;
