-- Charges a bucket in any state, for charge_any.lua. See token_bucket_change.lua (arithmetic) and bucket.lua (stored format).

look_any[1] = function(part)
  local others = others_of_bucket()
  local c, p, burst, keeps_instant = part.one, part.two, part.three, part.five
  if keeps_instant == 1 and operation == 'known' and part.is_new then error('TOLLGATE_FULL', 0) end
  local state = others.read(part.key)
  local allowed, after
  allowed, part[1], part[2], after =
    others.charge(state, c, p, burst, keeps_instant, part.cost, part.price_us, part.price_rest, now_us)
  part.answer = pack('>I7I7', part[1], part[2])
  part.fresh_at_us, part.slack_us = state.c and others.fresh_at(state) or state.full_us + 1, 1000000
  part.counts_from_us = now_us
  part.make = function() others.write(part.key, after, keeps_instant) end
  if state.c and not (state.c == c and state.p == p and state.burst == burst) then
    part.adopt = function()
      others.write(part.key, others.adopted(state, c, p, burst, keeps_instant, now_us), keeps_instant)
    end
  end
  return allowed
end

look_any[2] = look_any[1]
