-- What charge.lua asks of a fixed window.

look[3] = function(part)
  local end_us, count, start_us = read_window(part.key, part.two)
  local allowed, after_us, after, after_start_us =
    fixed_window_charge(end_us, count, start_us, part.one, part.two, part.three, part.cost, now_us)
  part[1], part[2], part[3] = end_us, count, start_us
  part.is_new = end_us == 0
  part.after_us, part.after, part.after_start_us = after_us, after, after_start_us
  part.at_us = math.max(now_us, after_start_us)
  part.fresh_at_us, part.slack_us = end_us, end_us - start_us
  return allowed
end

make[3] = function(part) write_window(part.key, part.after_us, part.after, part.after_start_us) end
