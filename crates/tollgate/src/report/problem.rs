//! The body of a refusal.
