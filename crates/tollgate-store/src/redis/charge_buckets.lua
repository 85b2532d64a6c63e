-- The everyday charge, in as few steps as it takes: buckets whose state is whole microseconds.
--
-- each: every key for itself, all under the same limit and at the same cost. It is told price_us, span_us, and how long the
-- state is to stay: PX and a time in ms that is enough for any state of the limit, or PX and nothing where that would be long
-- and is worked out instead; in tests PXAT and an instant.
--
-- The answer is a list of an integer for each key: what was missing before an admitted charge in us, or -1 less that for a
-- refused one, or STATE where what is kept under the key is something else, or FULL for a new key that the server has no memory
-- for. A refusal writes nothing but an expiry, should there be none.

if operation == 'each' then
  local get, format = redis.pcall, string.format
  local price_us, span_us, how, stay_ms = ARGV[3] + 0, ARGV[4] + 0, ARGV[5], ARGV[6]
  local answers = {}
  for index = 1, #KEYS do
    local key = KEYS[index]
    local state = get('GET', key) or 0
    local full_us = tonumber(state)
    if not full_us and type(state) == 'string' then
      -- Kept under a rate that left a rest: not quite a microsecond more.
      full_us = tonumber(string.match(state, '^(%d+):%d+$'))
      full_us = full_us and full_us + 1
    end
    if not full_us then
      answers[index] = {ok = 'STATE'}
    else
      local allowed, missing_us, _, after_us = token_bucket_charge(full_us, 0, 1, span_us, 0, price_us, 0, now_us)
      if allowed then
        local stay = stay_ms
        if stay == '' then stay = format('%d', (after_us - now_us) / 1000 + 1001) end
        -- Written out here, because Redis would write it as a fraction that happens to be whole, which takes it far longer.
        local value = format('%d', after_us)
        local kept = get('SET', key, value, how, stay)
        answers[index] = missing_us
        if kept.err then
          if not is_full(kept) then return kept end
          if state == 0 then
            answers[index] = {ok = 'FULL'}
          else
            begin_writing(key, after_us / 1000 + 1001)
            call('SET', key, value, how, stay)
          end
        end
      else
        if call('PTTL', key) == -1 then call('PEXPIREAT', key, format('%d', full_us / 1000 + 1001 + shift_ms)) end
        answers[index] = -1 - missing_us
      end
    end
  end
  return answers
end
