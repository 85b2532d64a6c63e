-- The stored state of concurrency limits: entries of thirty bytes, `h`, ordered by the end of the lease, with the sixteen bytes
-- of the holder, or zeros if there is no holder.

local NOBODY = string.rep('\0', 16)

-- The bytes of a holder, from 32 hexadecimal digits.
local function holder_of(digits)
  local function four(from) return tonumber(sub(digits, from, from + 7), 16) end
  return pack_struct('>I4I4I4I4', four(1), four(9), four(17), four(25))
end

-- Format 1: holder:cost, or @end_us:cost, with the end of the lease as score; and `=`, whose score is -1 less the sum of all
-- costs.
local function convert_leases(leases, key)
  local found = redis.pcall('ZRANGE', key, 0, -1, 'WITHSCORES')
  if is_other_type(found, 'ZRANGE', key, 0, 0) then return false end
  if found[1] ~= '=' or #found < 4 then return false end
  for at = 3, #found, 2 do
    local name, cost = string.match(found[at], '^([@%x]+):(%d+)$')
    if not name then return false end
    local holder = #name == 32 and holder_of(name) or NOBODY
    entries_insert(leases, found[at + 1] + 0, cost + 0, holder)
  end
  return true
end

local function read_leases(key)
  return read_entries(key, '\2h', 30, convert_leases)
end

local function write_leases(key, leases)
  local last_us = entries_last(leases)
  write_entries(key, leases, last_us or now_us, last_us and math.max(last_us - now_us, 0) or 0)
end

-- Takes a lease for the holder, or for none, and writes the leases.
local function take_lease(key, leases, whose, cost, end_us)
  concurrency_hold(leases, whose, cost, end_us, now_us)
  write_leases(key, leases)
end
