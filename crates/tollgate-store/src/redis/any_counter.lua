-- Charges a sliding window counter in any state, for charge_any.lua. See sliding_window_counter_change.lua (arithmetic) and
-- counter.lua (stored format).

look_any[5] = function(part)
  local others, window_us = others_of_counter(), part.two
  local newer, older = others.read(part.key, window_us)
  local allowed, after, after_older = others.charge(newer, older, part.one, window_us, part.cost, now_us)
  part[1], part[2], part[3], part[4] = newer.window_us, newer.start_us, newer.prev, newer.cur
  part[5], part[6], part[7], part[8] = older.window_us, older.start_us, older.prev, older.cur
  part.answer = pack('>c2I7I7I7I7I7I7I7I7', '\2C', unpack(part, 1, 8))
  part.counts_from_us = others.charged_at(after, after_older, now_us)
  part.fresh_at_us, part.slack_us = math.max(others.fresh_at(newer), others.fresh_at(older)), 0
  part.make = function() others.write(part.key, after, after_older) end
  return allowed
end
