-- Token bucket: twin of token_bucket.rs; see there for the rule.
--
-- An instant is whole us and a rest in units of 1/c us. What is missing is also reckoned as tokens and a rest in units of 1/p
-- token, because a change of numbers keeps tokens. The limit: c tokens every p us, burst, debt_us, keeps_instant (0 or 1).
--
-- State: a table. full_us and full_rest, the instant at which the bucket is full; zero is a full bucket. c, p and burst, the
-- numbers that it is written under; nil for those of its reader. wider_tokens, wider_rest and wider_at_us: what a larger
-- burst would miss at that instant; nil where that is the same. changed_at_us, changed_c and changed_p: the last change of
-- numbers and the fastest rate before it, or nil.

-- Whether a charge fits where the numbers are those of the state: answers allowed, what is missing before (us and rest), and
-- the next instant. A price is a cost as us and rest; one that can never fit is -1.
local function token_bucket_fit(full_us, full_rest, c, span_us, span_rest, price_us, price_rest, now_us)
  if full_us < now_us then full_us, full_rest = now_us, 0 end
  local after_us, after_rest = full_us + price_us, full_rest + price_rest
  if after_rest >= c then after_us, after_rest = after_us + 1, after_rest - c end
  local spent_us = after_us - now_us
  local allowed = price_us >= 0 and (spent_us < span_us or (spent_us == span_us and after_rest <= span_rest))
  return allowed, full_us - now_us, full_rest, after_us, after_rest
end
