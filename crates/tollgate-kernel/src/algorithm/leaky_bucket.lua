-- Leaky bucket: twin of leaky_bucket.rs; see there for the rule.
--
-- State and arithmetic are the token bucket's, read the other way round: what is missing there is what lies in this one. The
-- delay of an admitted charge is what was missing before it, and is worked out from that by leaky_bucket.rs.

local leaky_bucket_charge = token_bucket_charge
local leaky_bucket_give_back = token_bucket_give_back
local leaky_bucket_debit = token_bucket_debit
local leaky_bucket_fresh_at = token_bucket_fresh_at
