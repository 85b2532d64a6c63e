//! The words of `tollgate override`.

use clap::{Args, Subcommand};

use super::ServerArgs;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct OverrideArgs {
    #[command(subcommand)]
    pub(crate) command: Option<OverrideCommand>,
    #[command(flatten)]
    pub(crate) set: SetOverrideArgs,
}

#[derive(Subcommand)]
pub(crate) enum OverrideCommand {
    /// All overrides: those that were set, and those of the config
    List(ListOverridesArgs),
    /// Remove an override that was set: what the config says of the key holds again
    Remove(RemoveOverrideArgs),
}

#[derive(Args)]
#[group(id = "what_passes", required = true, multiple = true)]
pub(crate) struct WhatPasses {
    /// Deny every request of the key.
    #[arg(long, conflicts_with_all = ["unlimited", "limit_number", "window", "lease", "rate", "burst", "capacity"])]
    pub(crate) blocked: bool,
    /// Limit nothing.
    #[arg(long, conflicts_with_all = ["limit_number", "window", "lease", "rate", "burst", "capacity"])]
    pub(crate) unlimited: bool,
    /// Another limit, of windows and concurrency.
    #[arg(id = "limit_number", long = "limit", value_name = "N")]
    pub(crate) limit: Option<u64>,
    /// Another window, such as 1m.
    #[arg(long, value_name = "SPAN")]
    pub(crate) window: Option<String>,
    /// Another lease, of concurrency, such as 30s.
    #[arg(long, value_name = "SPAN")]
    pub(crate) lease: Option<String>,
    /// Another rate, of buckets, such as 100/s.
    #[arg(long, value_name = "RATE")]
    pub(crate) rate: Option<String>,
    /// Another burst, of token buckets.
    #[arg(long, value_name = "N")]
    pub(crate) burst: Option<u64>,
    /// Another capacity, of leaky buckets.
    #[arg(long, value_name = "N")]
    pub(crate) capacity: Option<u64>,
}

#[derive(Args)]
pub(crate) struct SetOverrideArgs {
    /// The name of the limit. It is there unless a subcommand is.
    #[arg(id = "limit_name", value_name = "LIMIT", required = true)]
    pub(crate) name: Option<String>,
    /// The key, as namespace:key[:version].
    #[arg(required = true)]
    pub(crate) key: Option<String>,
    #[command(flatten)]
    pub(crate) what: WhatPasses,
    /// When it ends: RFC 3339 such as 2030-01-01T18:00:00Z, or UNIX seconds. Without an end it holds until it is removed.
    #[arg(long, value_name = "TIME", conflicts_with = "lasts")]
    pub(crate) until: Option<String>,
    /// In how long it ends, such as 1h or 30m.
    #[arg(id = "lasts", long = "for", value_name = "SPAN")]
    pub(crate) lasts: Option<String>,
    /// Why, for the list of changes.
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Who asks, for the list of changes.
    #[arg(long, value_name = "NAME")]
    pub(crate) by: Option<String>,
    #[command(flatten)]
    pub(crate) with: AdminArgs,
}

#[derive(Args)]
pub(crate) struct ListOverridesArgs {
    #[command(flatten)]
    pub(crate) with: AdminArgs,
}

#[derive(Args)]
pub(crate) struct RemoveOverrideArgs {
    /// The name of the limit.
    pub(crate) limit: String,
    /// The key, as namespace:key[:version].
    pub(crate) key: String,
    /// Who asks, for the list of changes.
    #[arg(long, value_name = "NAME")]
    pub(crate) by: Option<String>,
    #[command(flatten)]
    pub(crate) with: AdminArgs,
}

/// Which server is asked, and what it is shown.
#[derive(Args)]
pub(crate) struct AdminArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// The admin token, where the server has one; others see arguments, so prefer the variable.
    #[arg(long, value_name = "TOKEN", env = "TOLLGATE_ADMIN_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// Print the server's JSON response.
    #[arg(long)]
    pub(crate) json: bool,
}
