//! Which path was asked for, in the one spelling that rules are compared with.
