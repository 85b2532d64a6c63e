//! tollgate-store
