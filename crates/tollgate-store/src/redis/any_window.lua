-- Charges a fixed window in any state, for charge_any.lua. See fixed_window.lua (arithmetic) and window.lua (stored format).

look_any[3] = function(part)
  local others = others_of_window()
  local end_us, count, start_us = others.read(part.key, part.two)
  local allowed, after_us, after, after_start_us =
    fixed_window_charge(end_us, count, start_us, part.one, part.two, part.three, part.cost, now_us)
  part[1], part[2], part[3] = end_us, count, start_us
  part.answer = pack('>c2I7I7I7', '\2w', end_us, count, start_us)
  part.counts_from_us = math.max(now_us, after_start_us)
  part.fresh_at_us, part.slack_us = end_us, end_us - start_us
  part.make = function() others.write(part.key, after_us, after, after_start_us) end
  return allowed
end
