//! Route limits from code and from a config: the programs of the README's tasks, and what hostile requests make of them.

#[path = "routes/failed_logins.rs"]
mod failed_logins;
#[path = "routes/from_config.rs"]
mod from_config;
#[path = "routes/hostile.rs"]
mod hostile;
#[path = "routes/per_ip.rs"]
mod per_ip;
#[path = "routes/per_plan.rs"]
mod per_plan;
#[path = "routes/service.rs"]
mod service;
