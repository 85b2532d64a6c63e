//! The fields that tell a caller how it stands.
