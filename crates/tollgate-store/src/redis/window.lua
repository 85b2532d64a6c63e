-- Fixed window: a string, end_us:count:length_us, where the window started so long before its end. Format 1 was end_us:count.

-- A window that does not say when it started is as long as the reader's.
local function read_window(key, window_us)
  local value = call('GET', key)
  if not value then return 0, 0, 0 end
  local end_us, count, length_us = string.match(value, '^(%d+):(%d+):?(%d*)$')
  if not end_us then not_ours() end
  end_us = end_us + 0
  return end_us, count + 0, end_us - (tonumber(length_us) or window_us)
end

local function write_window(key, end_us, count, start_us)
  set(key, format('%d:%d:%d', end_us, count, end_us - start_us), end_us, end_us - start_us)
end
