-- Charges: each of all its parts or of none. Several charges that are alike go in one call, one after the other, each for itself.
-- Up to four parts are charged in the loop below, which charging.rs writes for their strategies from quick/: nothing is looked up
-- there, and no table is made. Everything else is left to charge_any.lua.
--
-- charge, known, peek: the arguments after the operation are the number of parts in a charge, and for each of these ten: strategy,
-- shadow, cost, price_us, price_rest and the limit's five numbers; a cost that can never fit is -1. KEYS are the parts' keys, charge
-- after charge. known is a charge that begins no key under numbers that come with the call. hold: the parts' keys of each charge are
-- followed by the hold's, and the arguments of the parts by the time to live in us, the question as its caller would have it back,
-- or nothing where the parts say as much, how many bytes the names of all parts begin with, and the sixteen bytes of each charge's holder;
-- hold-part is the same for a charge of which other parts are held on other servers.
--
-- The answer is a list: now, and for each charge a string: the byte 1 where it passed, else 0, and what was found of each part, its
-- numbers in seven bytes each: two of a bucket, and three of a log or of leases; the state of a window as it is kept, and that of a
-- counter, or `\2C` and eight numbers where it counts by two lengths of window; zeros where there is none. Or STATE where what is kept
-- under a key is not ours, or FULL where there is no room for a new key: nothing of such a charge is written. Or FAILED where a
-- command was refused after an earlier charge of the call, or a part of this one, was written, or where this script cannot make
-- anything of a state; else the error itself is the answer. A call that has met much answers for its first charges alone, and
-- nothing of the others was done. A hold that is there already answers a list: HELD, the question that it was made with, and the
-- answer that it was given, its numbers with commas.

local each, keys, pack, read, pack_hold = redis.pcall, KEYS, struct.pack, struct.unpack, cmsgpack.pack
local find, match, sub, type, tonumber = string.find, string.match, string.sub, type, tonumber
local width, is_hold = ARGV[3] + 0, operation == 'hold' or operation == 'hold-part'
local first_after, stride = 4 + 10 * width, is_hold and width + 1 or width

-- Holds (hold.lua) are hold_head, and for each part hold_part, when it counts from and its key, and the numbers of the answer. They
-- last for as long as was asked, or as their longest lease. Where nothing is held, leases are nobody's.
local ttl_us, question, name_at = 0, '', 1
if is_hold then
  ttl_us, question, name_at = ARGV[first_after] + 0, ARGV[first_after + 1], ARGV[first_after + 2] + 1
else
  holder = string.rep('\0', 16)
end

local function hold_head(lasts_us)
  return pack_hold(0, now_us, lasts_us, 0, question, width)
end

local function hold_ms(lasts_us)
  return format('%d', (now_us + lasts_us) / 1000 + 1 + shift_ms)
end

local function hold_part(at, is_charged)
  local strategy, numbers = ARGV[at] + 0, {}
  for index = 1, HELD_NUMBERS[strategy] do numbers[index] = ARGV[at + 4 + index] + 0 end
  return pack_hold(strategy + 8 * ARGV[at + 1] + (is_charged and 0 or 16), ARGV[at + 2] + 0, unpack(numbers))
end

-- What is answered of a window and of a counter that there is nothing of.
local NO_WINDOW, NO_COUNTS = string.rep('\0', 23), string.rep('\0', 30)
