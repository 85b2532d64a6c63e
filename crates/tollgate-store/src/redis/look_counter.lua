-- What charge.lua asks of a sliding window counter. Counts of the limit's own window alone are charged by
-- sliding_window_counter.lua; others_of_counter() defines what knows all states.

local function look_counter_other(part)
  local others, window_us = others_of_counter(), part.two
  local newer, older = others.read(part.key, window_us)
  local allowed, after, after_older = others.charge(newer, older, part.one, window_us, part.cost, now_us)
  part[1], part[2], part[3], part[4] = newer.window_us, newer.start_us, newer.prev, newer.cur
  part[5], part[6], part[7], part[8] = older.window_us, older.start_us, older.prev, older.cur
  part.after, part.after_older = after, after_older
  part.at_us = others.charged_at(after, after_older, now_us)
  part.fresh_at_us, part.slack_us = math.max(others.fresh_at(newer), others.fresh_at(older)), 0
  return allowed
end

look[5] = function(part)
  local window_us, value = part.two, call('GET', part.key)
  local start_us, prev, cur = 0, 0, 0
  part.is_new = not value
  if value then
    local number, before, now, length_us = string.match(value, '^(%d+):(%d+):(%d+):(%d+)$')
    if not number or length_us + 0 ~= window_us then return look_counter_other(part) end
    start_us, prev, cur = number * window_us, before + 0, now + 0
    part[1], part[2], part[3], part[4] = window_us, start_us, prev, cur
  else
    part[1], part[2], part[3], part[4] = 0, 0, 0, 0
  end
  part[5], part[6], part[7], part[8] = 0, 0, 0, 0
  part.after, part.at_us = nil, now_us < start_us and start_us or now_us
  part.fresh_at_us, part.slack_us = start_us + 2 * window_us, 0
  local allowed
  allowed, part.start_us, part.prev, part.cur =
    sliding_window_counter_fit(start_us, prev, cur, part.one, window_us, part.cost, now_us)
  return allowed
end

make[5] = function(part)
  if part.after then return others_of_counter().write(part.key, part.after, part.after_older) end
  local window_us, start_us = part.two, part.start_us
  local value = format('%d:%d:%d:%d', start_us / window_us, part.prev, part.cur, window_us)
  -- It stays for up to two windows as it is, so there is no slack.
  set(part.key, value, start_us + 2 * window_us - 1, 0)
end
