-- Token bucket: twin of token_bucket.rs; see there for the rule.
--
-- State: full_us and full_rest, the instant at which the bucket is full, as whole us and a rest in units of 1/c us; zero is a
-- full bucket. The limit: c tokens every p us, span_us and span_rest to fill it, most_us the longest that a debt may take to
-- fill. A price is a cost in the same units; one that can never fit is told as price_us = -1.

-- Answers allowed, what is missing before (us and rest), and the next state.
local function token_bucket_charge(full_us, full_rest, c, span_us, span_rest, price_us, price_rest, now_us)
  if full_us < now_us then full_us, full_rest = now_us, 0 end
  -- A rest that was kept under another rate says less than a microsecond; it is taken as most of one.
  if full_rest >= c then full_rest = c - 1 end
  local after_us, after_rest = full_us + price_us, full_rest + price_rest
  if after_rest >= c then after_us, after_rest = after_us + 1, after_rest - c end
  local spent_us = after_us - now_us
  local allowed = price_us >= 0 and (spent_us < span_us or (spent_us == span_us and after_rest <= span_rest))
  return allowed, full_us - now_us, full_rest, after_us, after_rest
end

-- Tokens go back into the bucket, up to full.
local function token_bucket_give_back(full_us, full_rest, c, p, amount, now_us)
  if full_us < now_us then return full_us, full_rest end
  local returned_us, returned_rest = product_over(amount, p, c)
  full_us, full_rest = full_us - returned_us, full_rest - returned_rest
  if full_rest < 0 then full_us, full_rest = full_us - 1, full_rest + c end
  if full_us < now_us then full_us, full_rest = now_us, 0 end
  return full_us, full_rest
end

-- Takes an amount whether it fits or not; a debt is bounded by most_us.
local function token_bucket_debit(full_us, full_rest, c, p, most_us, amount, now_us)
  local price_us, price_rest = product_over(amount, p, c)
  local missing_us, missing_rest = 0, 0
  if full_us >= now_us then missing_us, missing_rest = full_us - now_us, full_rest end
  local after_us, after_rest = missing_us + price_us, missing_rest + price_rest
  if after_rest >= c then after_us, after_rest = after_us + 1, after_rest - c end
  if after_us >= most_us then after_us, after_rest = most_us, 0 end
  if after_us < missing_us then after_us, after_rest = missing_us, missing_rest end
  return now_us + after_us, after_rest
end

-- When the state says no more than a fresh one.
local function token_bucket_fresh_at(full_us, full_rest)
  if full_rest > 0 then return full_us + 1 end
  return full_us
end
