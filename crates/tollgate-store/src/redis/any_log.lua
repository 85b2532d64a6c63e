-- Charges the log of a sliding window in any state, for charge_any.lua. See sliding_window.lua (arithmetic) and log.lua (stored
-- format).

look_any[4] = function(part)
  local others, limit, window_us = others_of_log(), part.one, part.two
  local log, allowed = others.read(part.key), nil
  allowed, part[1], part[2], part[3], part.counts_from_us = others.peek(log, limit, window_us, part.cost, now_us)
  part.answer = pack('>I7I7I7', part[1], part[2], part[3])
  part.fresh_at_us, part.slack_us = others.fresh_at(log), window_us
  part.make = function() others.take(part.key, log, limit, window_us, part.cost, part.counts_from_us) end
  if log.length > 0 and log.keep_us < window_us then
    part.adopt = function()
      log.keep_us = window_us
      others.write(part.key, log)
    end
  end
  return allowed
end
