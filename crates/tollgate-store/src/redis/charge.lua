-- The charge script: each charge takes all its parts or none. A part is one (limit, key, cost). Several charges of the same shape
-- go in one call and are made one after the other, each separately. Up to four parts are charged in the loop that follows, which
-- charging.rs builds from quick/ for their strategies, without lookups and without tables. All other cases go to charge_any.lua.
--
-- Operations charge, known, peek: the arguments after the operation are the number of parts of a charge, and ten for each part:
-- strategy, shadow, cost, price_us, price_rest and the limit's five numbers; a cost that can never fit is -1. KEYS are the keys
-- of the parts, charge after charge. known is a charge that creates no key under a limit whose numbers come with the call.
-- Operation hold: the keys of the parts of each charge are followed by the key of the hold. The arguments of the parts are
-- followed by the time to live in us, the request to return to a repeated call (empty if the parts contain the same), the length
-- of the prefix of all part names, and the sixteen bytes of each charge's holder. hold-part is the same for a charge with other
-- parts on other servers.
--
-- The answer is a list: the time, and a string for each charge. The string is the byte 1 if the charge passed, or 0, then the
-- values of each part, seven bytes for each number: two for a bucket, three for a log or for leases; for a window its stored
-- state; for a counter its stored state, or `\2C` and eight numbers if it has counts of two window lengths; zeros if there is no
-- state. Instead of the string: STATE if the value of a key was not written by us; FULL if there is no room for a new key;
-- nothing of such a charge is written. FAILED if a command failed after an earlier charge of the call, or a part of this one, was
-- written, or if this script cannot process a state; in all other cases a failed command is the answer of the whole call. A call
-- with much work answers only its first charges, and does nothing for the others. If a hold exists already, its answer is a list:
-- HELD, the request it was made with, and the answer that was given, as numbers with commas.

local each, keys, pack, read, pack_hold = redis.pcall, KEYS, struct.pack, struct.unpack, cmsgpack.pack
local find, match, sub, type, tonumber = string.find, string.match, string.sub, type, tonumber
local width, is_hold = ARGV[3] + 0, operation == 'hold' or operation == 'hold-part'
local first_after, stride = 4 + 10 * width, is_hold and width + 1 or width

-- The stored hold (hold.lua) is hold_head; for each part hold_part, its start and its key; and the numbers of the answer. A hold
-- lasts for the requested time, or as long as its longest lease. Without a hold, leases have no holder.
local ttl_us, request, name_at = 0, '', 1
if is_hold then
  ttl_us, request, name_at = ARGV[first_after] + 0, ARGV[first_after + 1], ARGV[first_after + 2] + 1
else
  holder = string.rep('\0', 16)
end

local function hold_head(lasts_us)
  return pack_hold(0, now_us, lasts_us, 0, request, width)
end

local function hold_ms(lasts_us)
  return format('%d', (now_us + lasts_us) / 1000 + 1 + shift_ms)
end

local function hold_part(at, is_charged)
  local strategy, numbers = ARGV[at] + 0, {}
  for index = 1, HELD_NUMBERS[strategy] do numbers[index] = ARGV[at + 4 + index] + 0 end
  return pack_hold(strategy + 8 * ARGV[at + 1] + (is_charged and 0 or 16), ARGV[at + 2] + 0, unpack(numbers))
end

-- The answers for a window and a counter without state.
local NO_WINDOW, NO_COUNTS = string.rep('\0', 23), string.rep('\0', 30)
