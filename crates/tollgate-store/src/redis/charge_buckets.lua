-- The everyday charge, in as few steps as it takes: buckets whose state is whole microseconds.
--
-- each: every key for itself, all under the same limit and at the same cost. It is told price_us, span_us, how long the state is
-- to stay (PX and a time in ms that is enough for any state of the limit, or PX and nothing where that would be long and is
-- worked out instead; in tests PXAT and an instant), and the limit's numbers as they end a state: /c/p/burst. each-instant is the
-- same for buckets that keep their instant, whose state is the instant alone. each-known is that for keys that are there: one
-- that is not answers FULL, and stays so.
--
-- The answer is a list of an integer for each key: what was missing before an admitted charge in us, or -1 less that for a
-- refused one; or STATE where what is kept under the key is something else, or FULL where there is no room for a new key. A
-- refusal writes nothing but an expiry, should there be none.

local each, format, sub = redis.pcall, string.format, string.sub
local price_us, span_us, how, stay_ms, numbers = ARGV[3] + 0, ARGV[4] + 0, ARGV[5], ARGV[6], ARGV[7]
local is_plain, is_known = operation ~= 'each', operation == 'each-known'
local cut, answers, others = -#numbers - 1, {}, nil

-- Writes what a charge left; answers false where there is no room for a new key.
local function write(key, value, until_us)
  local stay = stay_ms
  if stay == '' then stay = format('%d', (until_us - now_us) / 1000 + 1001) end
  local reply = each('SET', key, value, how, stay)
  if not reply.err then return true end
  if string.find(reply.err, 'OOM', 1, true) then
    if call('PTTL', key) == -2 then return false end
    -- Never refused for want of memory, and what comes after it in a script is not either.
    call('PEXPIREAT', key, format('%d', until_us / 1000 + 1001 + shift_ms))
  end
  -- Or says again what else is wrong.
  call('SET', key, value, how, stay)
  return true
end

for index = 1, #KEYS do
  local key = KEYS[index]
  local state = each('GET', key)
  local full_us
  if not state then
    full_us = 0
  elseif is_plain then
    full_us = tonumber(state)
  elseif type(state) == 'string' and sub(state, cut + 1) == numbers then
    full_us = tonumber(sub(state, 1, cut), 16)
  end
  if not full_us then
    others = others or {}
    others[#others + 1] = index
    answers[index] = 0
  elseif is_known and not state then
    answers[index] = {ok = 'FULL'}
  else
    local allowed, missing_us, _, after_us = token_bucket_fit(full_us, 0, 1, span_us, 0, price_us, 0, now_us)
    if allowed then
      -- Written out here, because Redis would write it as a fraction that happens to be whole, which takes it far longer.
      local value = is_plain and format('%d', after_us) or format('%x', after_us) .. numbers
      answers[index] = write(key, value, after_us) and missing_us or {ok = 'FULL'}
    else
      if call('PTTL', key) == -1 then call('PEXPIREAT', key, format('%d', full_us / 1000 + 1001 + shift_ms)) end
      answers[index] = -1 - missing_us
    end
  end
end
if not others then return answers end
