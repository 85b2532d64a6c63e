-- What charge.lua asks of a sliding window. A log of a single block, kept for as long as this window is, that has room for the cost
-- is charged here; others_of_log() defines what knows all logs, and refuses. See sliding_window.lua, entries_kept.lua.

local function look_log_other(part)
  local others, limit, window_us = others_of_log(), part.one, part.two
  local log, allowed = others.read(part.key), nil
  allowed, part[1], part[2], part[3], part.at_us = others.peek(log, limit, window_us, part.cost, now_us)
  part.log = log
  part.fresh_at_us, part.slack_us = others.fresh_at(log), window_us
  part.is_other = log.length > 0 and log.keep_us < window_us
  return allowed
end

look[4] = function(part)
  local window_us, value, read = part.two, redis.pcall('GET', part.key), struct.unpack
  local size, total, from, newest_us = 16, 0, 17, 0
  part.is_new = not value
  if value then
    size = type(value) == 'string' and #value or 0
    -- With room for one more in the block, at least one record, and nothing broken.
    if size < 30 or size > 1794 or size % 14 ~= 2 or string.sub(value, 1, 2) ~= '\2l' then return look_log_other(part) end
    local keep_us
    keep_us, total = read('>I7I7', value, 3)
    newest_us = read('>I7', value, size - 13)
    if keep_us ~= window_us or newest_us >= now_us then return look_log_other(part) end
    while from < size do
      local at_us, gone = read('>I7I7', value, from)
      if at_us + window_us > now_us then break end
      from, total = from + 14, total - gone
    end
  end
  if part.cost <= 0 or part.cost > part.one - total then return look_log_other(part) end
  part[1], part[2], part[3] = total, 0, math.max(newest_us + window_us - now_us, 0)
  part.log, part.records, part.at_us = nil, value and string.sub(value, from) or '', now_us
  part.fresh_at_us, part.slack_us = newest_us + window_us, window_us
  return true
end

make[4] = function(part)
  if part.log then return others_of_log().take(part.key, part.log, part.one, part.two, part.cost, part.at_us) end
  local head = pack('>c2I7I7', '\2l', part.two, part[1] + part.cost)
  set(part.key, head .. part.records .. pack('>I7I7', now_us, part.cost), now_us + part.two, part.two)
end

adopt[4] = function(part)
  part.log.keep_us = part.two
  others_of_log().write(part.key, part.log)
end
