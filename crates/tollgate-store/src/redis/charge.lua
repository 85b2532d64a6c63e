-- Charges: each of all its parts or of none. Several charges that are alike go in one call, one after the other, each for itself.
-- Up to three parts are charged in the loop below, which charging.rs writes for their strategies from quick/: nothing is looked up
-- there, and no table is made. Everything else is left to charge_any.lua.
--
-- charge, known, peek: the arguments after the operation are the number of parts in a charge, and for each of these ten: strategy,
-- shadow, cost, price_us, price_rest and the limit's five numbers; a cost that can never fit is -1. KEYS are the parts' keys, charge
-- after charge. known is a charge that begins no key under numbers that come with the call. hold: the parts' keys of each charge are
-- followed by the hold's, and the arguments of the parts by the time to live in us, the question as its caller would have it back,
-- and the holder of each charge; hold-part is the same for a charge of which other parts are held on other servers.
--
-- The answer is a list: now, and for each charge a string of numbers, seven bytes each: whether it passed, and what was found of each
-- part: two numbers of a bucket, eight of a counter, three of others. Or STATE where what is kept under a key is not ours, or FULL
-- where there is no room for a new key: nothing of such a charge is written. Or FAILED where a command was refused after an earlier
-- charge of the call, or a part of this one, was written, or where this script cannot make anything of a state; else the error itself is the answer. A call that has met much answers for its first charges
-- alone, and nothing of the others was done. A hold that is there already answers a list: HELD,
-- the question that it was made with, and the answer that it was given, its numbers with commas.

local each, keys, pack, read = redis.pcall, KEYS, struct.pack, struct.unpack
local find, match, sub = string.find, string.match, string.sub
local width, is_hold = ARGV[3] + 0, operation == 'hold' or operation == 'hold-part'
local first_after, stride = 4 + 10 * width, is_hold and width + 1 or width

-- What holds have in common: their text is hold_head, a hold_line for each part, hold_tail. They last for as long as was asked, or as
-- their longest lease. See hold.lua.
local ttl_us, hold_tail = 0, ''
if is_hold then ttl_us, hold_tail = ARGV[first_after] + 0, '\n' .. ARGV[first_after + 1] end

local function hold_head(answer, lasts_us)
  return format('\2 0 %d %d %s %s\n', now_us + lasts_us, lasts_us, holder, answer)
end

local function hold_ms(lasts_us)
  return format('%d', (now_us + lasts_us) / 1000 + 1 + shift_ms)
end

local function hold_line(index)
  local at = 10 * index - 6
  return ARGV[at] .. ' %d %d %s ' .. table.concat(ARGV, ' ', at + 5, at + 9) .. ' ' .. index .. '\n'
end

-- Writes a state in one step, and answers whether that was refused.
local function put(key, value, fresh_at_us, slack_us)
  local until_us = fresh_at_us + (slack_us < 1000000 and slack_us or 1000000)
  if each('SET', key, value, 'PXAT', format('%d', until_us / 1000 + 1 + shift_ms)).err then return true end
  if has_room == nil then has_room = true end
end
