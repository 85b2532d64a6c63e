-- The stored state of a fixed window, a string of 23 bytes: the byte 2, `w`, and end_us, count and start_us in seven bytes each.
-- Before, it was end_us:count:length_us in decimal, and end_us:count in format 1.

local WINDOW = '>c2I7I7I7'

-- A window without a start has the length of the reader's window.
local function read_window(key, window_us)
  local value = call('GET', key)
  if not value then return 0, 0, 0 end
  if #value == 23 then
    local kind, end_us, count, start_us = struct.unpack(WINDOW, value)
    if kind == '\2w' then return end_us, count, start_us end
  end
  local end_us, count, length_us = string.match(value, '^(%d+):(%d+):?(%d*)$')
  if not end_us then not_ours() end
  end_us = whole(end_us)
  return end_us, whole(count), end_us - (length_us ~= '' and whole(length_us) or window_us)
end

local function write_window(key, end_us, count, start_us)
  set(key, struct.pack(WINDOW, '\2w', end_us, count, start_us), end_us, end_us - start_us)
end
