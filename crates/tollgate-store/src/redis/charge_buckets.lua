-- The everyday charge, in as few steps as it takes: buckets whose state is whole microseconds.
--
-- one: KEYS[1] and price_us, span_us, slack_ms. each: the same three for each key, every key charged for itself. The answer is
-- an integer for each key: what was missing before an admitted charge in us, or -1 less that for a refused one; STATE where
-- what is kept under the key is something else. A refusal writes nothing but an expiry, should there be none.

if operation == 'one' then
  local key = KEYS[1]
  local full_us = tonumber(call('GET', key) or 0)
  if not full_us then return {ok = 'STATE'} end
  local allowed, missing_us, _, after_us = token_bucket_charge(full_us, 0, 1, ARGV[4] + 0, 0, ARGV[3] + 0, 0, now_us)
  if allowed then
    call('SET', key, after_us, 'PXAT', (after_us - after_us % 1000) / 1000 + ARGV[5] + shift_ms)
    return missing_us
  end
  if call('PTTL', key) == -1 then
    call('PEXPIREAT', key, (full_us - full_us % 1000) / 1000 + ARGV[5] + shift_ms)
  end
  return -1 - missing_us
end

if operation == 'each' then
  local states, answers = call('MGET', unpack(KEYS)), {}
  for index, key in ipairs(KEYS) do
    local at = 3 * index
    local full_us = tonumber(states[index] or 0)
    if not full_us then return {ok = 'STATE'} end
    local allowed, missing_us, _, after_us =
      token_bucket_charge(full_us, 0, 1, ARGV[at + 1] + 0, 0, ARGV[at] + 0, 0, now_us)
    if allowed then
      call('SET', key, after_us, 'PXAT', (after_us - after_us % 1000) / 1000 + ARGV[at + 2] + shift_ms)
      answers[index] = missing_us
    else
      if call('PTTL', key) == -1 then
        call('PEXPIREAT', key, (full_us - full_us % 1000) / 1000 + ARGV[at + 2] + shift_ms)
      end
      answers[index] = -1 - missing_us
    end
  end
  return answers
end
