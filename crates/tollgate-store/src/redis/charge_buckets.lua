-- The common charge, in as few steps as possible: buckets whose state is whole microseconds.
--
-- Operation charge: charges every key separately, all under the same limit and with the same cost. The arguments are price_us,
-- span_us, the expiry of the state (PX and a time in ms that is enough for any state of the limit, or PX and an empty string if
-- that time would be long and is computed instead; in tests PXAT and an instant), the limit's numbers as they end a state:
-- /c/p/burst, and whether the bucket keeps its instant: then its state is the instant alone. `known` charges only existing keys:
-- a missing key answers FULL.
--
-- The answer is a list: the time, and an integer for each key: the deficit before an admitted charge in us, or -1 less the
-- deficit for a denied one; or STATE if the value under the key is something else, or FULL if there is no room for a new key. A
-- denial writes nothing, except an expiry if there is none.

local each, format, sub, tonumber, type, keys = redis.pcall, string.format, string.sub, tonumber, type, KEYS
local price_us, span_us, how, stay_ms, numbers, is_plain = ARGV[3] + 0, ARGV[4] + 0, ARGV[5], ARGV[6], ARGV[7], ARGV[8] == '1'
local is_known = operation == 'known'
-- While the clock stands still, the state stays longer by the time that the server's clock is behind.
if now_us > server_us and how == 'PX' then stay_ms = '' end
local cut, answers, others = -#numbers - 1, {now_us}, nil

for index = 1, #keys do
  local key = keys[index]
  local state, full_us = each('GET', key), 0
  if state then
    full_us = nil
    if is_plain then
      full_us = tonumber(state)
    elseif type(state) == 'string' and sub(state, cut + 1) == numbers then
      full_us = tonumber(sub(state, 1, cut), 16)
    end
  end
  if not full_us then
    others = others or {}
    others[#others + 1] = index
    answers[index + 1] = 0
  elseif is_known and not state then
    answers[index + 1] = {ok = 'FULL'}
  else
    local allowed, missing_us, _, after_us = token_bucket_fit(full_us, 0, 1, span_us, 0, price_us, 0, now_us)
    if allowed then
      local stay = stay_ms
      if stay == '' then stay = format('%d', (after_us - server_us) / 1000 + 1001) end
      -- Formatted here, because Redis would format the number as a float, which is much slower.
      local value = is_plain and format('%d', after_us) or format('%x', after_us) .. numbers
      local reply = each('SET', key, value, how, stay)
      answers[index + 1] = missing_us
      if reply.err then
        -- Redis refuses nothing after the first write of a script, so from here on this script itself refuses new keys.
        is_known = is_known or string.find(reply.err, 'OOM', 1, true)
        if is_known and not state then
          answers[index + 1] = {ok = 'FULL'}
        else
          -- Never refused for lack of memory.
          call('PEXPIREAT', key, format('%d', after_us / 1000 + 1001 + shift_ms))
          -- Repeats any other error.
          call('SET', key, value, how, stay)
        end
      end
    else
      if call('PTTL', key) == -1 then
        -- Sets nothing, and shows whether there is memory, before the expiry is written.
        local reply = each('SET', key, '', 'NX')
        is_known = is_known or reply and reply.err and string.find(reply.err, 'OOM', 1, true)
        call('PEXPIREAT', key, format('%d', full_us / 1000 + 1001 + shift_ms))
      end
      answers[index + 1] = -1 - missing_us
    end
  end
end
if not others then return answers end
