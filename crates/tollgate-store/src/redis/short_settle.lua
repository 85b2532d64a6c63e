-- The fast path of a settlement: a hold of one lease, of a key whose leases are a single block. Returns nil in all other cases.
-- See entries_kept.lua, hold.lua.

local count, names_start = ARGV[3] + 0, ARGV[4]
local amounts_at = 5 + count

-- Whether this call has written anything.
local has_written = false

local each, find, sub, byte, pcall, type = redis.pcall, string.find, string.sub, string.byte, pcall, type
local pack, read, read_hold = struct.pack, struct.unpack, cmsgpack.unpack_limit

local function settle_lease(hold_key)
  local value = each('GET', hold_key)
  -- Open holds start with a zero.
  if type(value) ~= 'string' or byte(value) ~= 0 then return end
  local is_sound, _, _, charged_us, ttl_us, from_us, _, width, code, cost, _, _, after_us, name =
    pcall(read_hold, value, 12, 0)
  if not is_sound or width ~= 1 or (code ~= 6 and code ~= 14) then return end
  local end_us = charged_us + after_us
  if (from_us > 0 and from_us or charged_us) + ttl_us <= now_us or end_us <= now_us then return end
  local key = names_start .. name
  local leases = each('GET', key)
  if type(leases) ~= 'string' or #leases < 46 or #leases % 30 ~= 16 or sub(leases, 1, 2) ~= '\2h' then return end
  local at = find(leases, pack('>I7I7c16', end_us, cost, holder), 17, true)
  -- A match that is not at the start of a record, and a key that lost its expiry, are left to settle.lua.
  if not at or (at - 17) % 30 ~= 0 or call('PTTL', hold_key) <= 0 then return end
  if #leases > 46 and call('PTTL', key) <= 0 then return end
  -- First, because without memory this command is refused, and no command after it is.
  call('SETRANGE', hold_key, '0', '\1')
  has_written = true
  if #leases == 46 then
    call('DEL', key)
  else
    local head = sub(leases, 1, 9) .. pack('>I7', read('>I7', leases, 10) - cost)
    call('SET', key, head .. sub(leases, 17, at - 1) .. sub(leases, at + 30), 'KEEPTTL')
  end
  return 'DONE'
end
