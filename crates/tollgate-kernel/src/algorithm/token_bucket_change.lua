-- Token bucket, second part: twin of what token_bucket.rs does when numbers change and when charges are settled.

-- Instants later than this are kept as this one: the year 2255.
local LATEST_US = 9007199254740991

-- A time of refill as tokens and rest.
local function token_bucket_tokens(us, rest, c, p)
  local tokens, part = product_over(us, c, p)
  part = part + rest
  local over = math.fmod(part, p)
  return tokens + (part - over) / p, over
end

-- Tokens and rest as a time of refill.
local function token_bucket_refill(tokens, rest, c, p)
  local us, part = product_over(tokens, p, c)
  part = part + rest
  local over = math.fmod(part, c)
  return us + (part - over) / c, over
end

local function token_bucket_less(tokens, rest, other_tokens, other_rest)
  return tokens < other_tokens or (tokens == other_tokens and rest < other_rest)
end

-- Tokens less others, and not below none.
local function token_bucket_minus(tokens, rest, other_tokens, other_rest, p)
  tokens, rest = tokens - other_tokens, rest - other_rest
  if rest < 0 then tokens, rest = tokens - 1, rest + p end
  if tokens < 0 then return 0, 0 end
  return tokens, rest
end

-- So many tokens in other units; what is not whole rounds up or down.
local function token_bucket_carried(tokens, rest, from_p, to_p, is_up)
  if from_p == to_p then return tokens, rest end
  local carried, left = product_over(rest, to_p, from_p)
  if is_up and left > 0 then carried = carried + 1 end
  if carried >= to_p then return tokens + 1, carried - to_p end
  return tokens, carried
end

-- What is missing from the bucket.
local function token_bucket_missing(state, now_us)
  if state.full_us < now_us then return 0, 0 end
  return token_bucket_tokens(state.full_us - now_us, state.full_rest, state.c, state.p)
end

-- What a larger burst would miss.
local function token_bucket_wider(state, now_us)
  if not state.wider_tokens then return 0, 0 end
  local c, p = state.c, state.p
  if now_us < state.wider_at_us then
    local tokens, rest = token_bucket_tokens(state.wider_at_us - now_us, state.wider_rest, c, p)
    return tokens + state.wider_tokens, rest
  end
  local tokens, rest = token_bucket_tokens(now_us - state.wider_at_us, 0, c, p)
  return token_bucket_minus(state.wider_tokens, state.wider_rest, tokens, rest, p)
end

local function token_bucket_set_missing(state, tokens, rest, now_us)
  local us, part = token_bucket_refill(tokens, rest, state.c, state.p)
  state.full_us, state.full_rest = now_us + us, part
  if state.full_us > LATEST_US then state.full_us, state.full_rest = LATEST_US, 0 end
end

-- Moves the second instant to where so much is missing, and drops it where it says no more than the first.
local function token_bucket_set_wider(state, tokens, rest, now_us)
  local missing, missing_rest = token_bucket_missing(state, now_us)
  if token_bucket_less(missing, missing_rest, tokens, rest) then
    state.wider_tokens, state.wider_rest, state.wider_at_us = tokens, rest, now_us
  else
    state.wider_tokens, state.wider_rest, state.wider_at_us = nil, nil, nil
  end
end

-- Whether all that was charged before the last change has refilled.
local function token_bucket_is_over(state, now_us)
  if not state.changed_at_us then return true end
  local tokens = token_bucket_tokens(math.max(now_us - state.changed_at_us, 0), 0, state.c, state.p)
  return tokens >= state.burst
end

-- The state as a bucket of these numbers writes it.
local function token_bucket_adopted(state, c, p, burst, keeps_instant, now_us)
  local own = {full_us = state.full_us, full_rest = state.full_rest, c = c, p = p, burst = burst}
  if not state.c then
    -- A rest that was kept under an unknown rate says less than a microsecond.
    if own.full_rest >= c then own.full_us, own.full_rest = own.full_us + 1, 0 end
    return own
  end
  if state.c == c and state.p == p and state.burst == burst then
    own.wider_tokens, own.wider_rest, own.wider_at_us = state.wider_tokens, state.wider_rest, state.wider_at_us
    if not token_bucket_is_over(state, now_us) then
      own.changed_at_us, own.changed_c, own.changed_p = state.changed_at_us, state.changed_c, state.changed_p
    end
    return own
  end
  if keeps_instant == 1 then
    local part, left = product_over(state.full_rest, c, state.c)
    if left > 0 then part = part + 1 end
    if part >= c then own.full_us, part = own.full_us + 1, part - c end
    own.full_rest = part
    return own
  end
  own.changed_at_us, own.changed_c, own.changed_p = now_us, state.c, state.p
  if not token_bucket_is_over(state, now_us) then
    -- Whether the rate before was faster: changed_c * p > c * changed_p, both divided by p.
    local one, one_rest = product_over(state.changed_c, state.p, state.changed_p)
    if one > state.c or (one == state.c and one_rest > 0) then
      own.changed_c, own.changed_p = state.changed_c, state.changed_p
    end
  end
  local missing, missing_rest = token_bucket_missing(state, now_us)
  local total, total_rest = token_bucket_wider(state, now_us)
  if token_bucket_less(total, total_rest, missing, missing_rest) then total, total_rest = missing, missing_rest end
  local debt, debt_rest = token_bucket_minus(missing, missing_rest, state.burst, 0, state.p)
  local kept, kept_rest = missing, missing_rest
  if burst > state.burst then kept, kept_rest = total, total_rest end
  kept, kept_rest = token_bucket_carried(kept, kept_rest, state.p, p, true)
  debt, debt_rest = token_bucket_carried(debt, debt_rest, state.p, p, true)
  if token_bucket_less(burst + debt, debt_rest, kept, kept_rest) then kept, kept_rest = burst + debt, debt_rest end
  total, total_rest = token_bucket_carried(total, total_rest, state.p, p, true)
  token_bucket_set_missing(own, kept, kept_rest, now_us)
  token_bucket_set_wider(own, total, total_rest, now_us)
  return own
end

-- Answers allowed, what is missing before (us and rest), and the next state, adopted whether allowed or not.
local function token_bucket_charge(state, c, p, burst, keeps_instant, cost, price_us, price_rest, now_us)
  local own = token_bucket_adopted(state, c, p, burst, keeps_instant, now_us)
  local span_us, span_rest = product_over(burst, p, c)
  local allowed, missing_us, missing_rest, after_us, after_rest =
    token_bucket_fit(own.full_us, own.full_rest, c, span_us, span_rest, price_us, price_rest, now_us)
  if allowed then
    local wider, wider_rest = token_bucket_wider(own, now_us)
    own.full_us, own.full_rest = after_us, after_rest
    if own.wider_tokens then token_bucket_set_wider(own, wider + cost, wider_rest, now_us) end
  end
  return allowed, missing_us, missing_rest, own
end

-- Tokens go back into the bucket, up to full: at most what has not refilled since the charge. Answers the next state.
local function token_bucket_give_back(state, c, p, burst, keeps_instant, cost, charged_at_us, amount, now_us)
  if keeps_instant == 1 or not state.c then
    state = token_bucket_adopted(state, c, p, burst, keeps_instant, now_us)
  end
  local under_p, elapsed_us = state.p, math.max(now_us - charged_at_us, 0)
  -- What goes back of a charge of so much.
  local function returned(taken)
    local returned, returned_rest = amount, 0
    local function at_most_not_refilled(by_c, by_p)
      local tokens, rest = token_bucket_tokens(elapsed_us, 0, by_c, by_p)
      tokens, rest = token_bucket_minus(taken, 0, tokens, rest, by_p)
      tokens, rest = token_bucket_carried(tokens, rest, by_p, under_p, false)
      if token_bucket_less(tokens, rest, returned, returned_rest) then returned, returned_rest = tokens, rest end
    end
    at_most_not_refilled(state.c, under_p)
    at_most_not_refilled(c, p)
    if state.changed_at_us and charged_at_us < state.changed_at_us then
      at_most_not_refilled(state.changed_c, state.changed_p)
    end
    return returned, returned_rest
  end
  -- The second instant counts all of the charge. The first has at most a burst of it, and none of it as long as other charges alone are
  -- enough to empty the bucket.
  local wider, wider_rest = token_bucket_wider(state, now_us)
  local is_wider = wider > 0 or wider_rest > 0
  local back, back_rest = returned(cost)
  wider, wider_rest = token_bucket_minus(wider, wider_rest, back, back_rest, under_p)
  if state.full_us >= now_us then
    local tokens, rest = token_bucket_missing(state, now_us)
    back, back_rest = returned(math.min(cost, state.burst))
    local left, left_rest = token_bucket_minus(tokens, rest, back, back_rest, under_p)
    if is_wider then
      local others, others_rest = wider, wider_rest
      if token_bucket_less(state.burst, 0, others, others_rest) then others, others_rest = state.burst, 0 end
      if token_bucket_less(left, left_rest, others, others_rest) then left, left_rest = others, others_rest end
      if token_bucket_less(tokens, rest, left, left_rest) then left, left_rest = tokens, rest end
    end
    token_bucket_set_missing(state, left, left_rest, now_us)
  end
  if state.wider_tokens then token_bucket_set_wider(state, wider, wider_rest, now_us) end
  return state
end

-- Takes an amount whether it fits or not, as a debt of at most debt_us of refill and 2^62 units. Answers the next state.
local function token_bucket_debit(state, c, p, burst, keeps_instant, debt_us, amount, now_us)
  if keeps_instant == 1 or not state.c then
    state = token_bucket_adopted(state, c, p, burst, keeps_instant, now_us)
  end
  local most_us = math.min(debt_us, (product_over(2147483648, 2147483648, state.c)))
  local debt, debt_rest = token_bucket_tokens(most_us, 0, state.c, state.p)
  local function owed(tokens, rest, most, most_rest)
    local after, after_rest = tokens + amount, rest
    if token_bucket_less(most, most_rest, after, after_rest) then after, after_rest = most, most_rest end
    if token_bucket_less(after, after_rest, tokens, rest) then return tokens, rest end
    return after, after_rest
  end
  local missing, missing_rest = token_bucket_missing(state, now_us)
  local wider, wider_rest = token_bucket_wider(state, now_us)
  local is_wider = wider > 0 or wider_rest > 0 or burst > state.burst
  if token_bucket_less(wider, wider_rest, missing, missing_rest) then wider, wider_rest = missing, missing_rest end
  missing, missing_rest = owed(missing, missing_rest, debt + state.burst, debt_rest)
  token_bucket_set_missing(state, missing, missing_rest, now_us)
  if is_wider and keeps_instant ~= 1 then
    -- What a larger burst would miss is kept, up to sixteen times what this one may.
    local most = math.min(16 * (math.max(burst, state.burst) + debt), 9007199254740991)
    wider, wider_rest = owed(wider, wider_rest, most, 0)
    token_bucket_set_wider(state, wider, wider_rest, now_us)
  end
  return state
end

-- When the state says no more than a fresh one.
local function token_bucket_fresh_at(state)
  local fresh_at_us = state.full_us
  if state.full_rest > 0 then fresh_at_us = fresh_at_us + 1 end
  if state.wider_tokens then
    local us = token_bucket_refill(state.wider_tokens, state.wider_rest, state.c, state.p)
    fresh_at_us = math.max(fresh_at_us, state.wider_at_us + us + 1)
  end
  if state.changed_at_us then
    local us = token_bucket_refill(state.burst, 0, state.c, state.p)
    fresh_at_us = math.max(fresh_at_us, state.changed_at_us + us + 1)
  end
  return math.min(fresh_at_us, LATEST_US)
end
