-- Second half of charge_buckets.lua: states with more than an instant under the limit's own numbers. They were written under
-- other numbers, or in an older format.

local c, p, burst = string.match(numbers, '^/(%x+)/(%x+)/(%x+)$')
c, p, burst = tonumber(c, 16), tonumber(p, 16), tonumber(burst, 16)
local keeps_instant = is_plain and 1 or 0
for _, index in ipairs(others) do
  local key = KEYS[index]
  local is_ours, state = pcall(read_bucket, key)
  if not is_ours then
    answers[index + 1] = {ok = 'STATE'}
  else
    local allowed, missing_us, missing_rest, after =
      token_bucket_charge(state, c, p, burst, keeps_instant, price_us / p, price_us, 0, now_us)
    -- A denial also writes a state of other numbers back, converted to the limit's numbers.
    local is_other = state.c and not (state.c == c and state.p == p and state.burst == burst)
    if allowed or is_other then write_bucket(key, after, keeps_instant) end
    if not allowed and call('PTTL', key) == -1 then
      call('PEXPIREAT', key, expire_ms(key, token_bucket_fresh_at(after), span_us))
    end
    if allowed then answers[index + 1] = missing_us else answers[index + 1] = -1 - missing_us end
  end
end
return answers
