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

local function look_window(part, at)
  local window_us = ARGV[at + 6] + 0
  local end_us, found, start_us = read_window(part.key, window_us)
  local allowed, after_us, after, after_start_us =
    fixed_window_charge(end_us, found, start_us, ARGV[at + 5] + 0, window_us, ARGV[at + 7] + 0, part.cost, now_us)
  part.found = {end_us, found, start_us}
  part.at_us = math.max(now_us, after_start_us)
  part.fresh_at_us, part.slack_us = end_us, end_us - start_us
  part.write = function() write_window(part.key, after_us, after, after_start_us) end
  return allowed
end
