//! Who the client is: the address that pays, safe from what a request claims.
