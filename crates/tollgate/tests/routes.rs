//! Route limits from code and from a config, and what hostile requests make of them. The programs of the README's tasks are in
//! `programs.rs`.

#[path = "routes/from_config.rs"]
mod from_config;
#[path = "routes/hostile.rs"]
mod hostile;
#[path = "routes/per_plan.rs"]
mod per_plan;
#[path = "routes/service.rs"]
mod service;
