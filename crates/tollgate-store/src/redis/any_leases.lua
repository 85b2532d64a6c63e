-- Charges a concurrency limit in any state, for charge_any.lua. See concurrency.lua (arithmetic) and leases.lua (stored format).

look_any[6] = function(part)
  local others, lease_us = others_of_leases(), part.two
  local leases, allowed = others.read(part.key), nil
  allowed, part[1], part[2], part[3] = others.peek(leases, part.one, part.cost, now_us)
  part.answer = pack('>I7I7I7', part[1], part[2], part[3])
  part.counts_from_us = now_us + lease_us
  part.fresh_at_us, part.slack_us = now_us + part[3], lease_us
  part.make = function() others.take(part.key, leases, holder, part.cost, part.counts_from_us) end
  return allowed
end
