-- What charge.lua asks of a bucket. A state that says no more than an instant under the limit's own numbers is charged by
-- token_bucket.lua alone; others_of_bucket() defines what knows all states.

local function look_bucket_other(part)
  local others = others_of_bucket()
  local c, p, burst, keeps_instant = part.one, part.two, part.three, part.five
  local state = others.read(part.key)
  local allowed
  allowed, part[1], part[2], part.after =
    others.charge(state, c, p, burst, keeps_instant, part.cost, part.price_us, part.price_rest, now_us)
  part.is_other = state.c and not (state.c == c and state.p == p and state.burst == burst)
  part.state = state
  part.fresh_at_us, part.slack_us = state.c and others.fresh_at(state) or state.full_us + 1, 1000000
  return allowed
end

look[1] = function(part)
  local c, keeps_instant, value = part.one, part.five, call('GET', part.key)
  if not part.own then
    part.numbers_end = format('/%x/%x/%x', c, part.two, part.three)
    part.own = keeps_instant == 1 and '^(%d+)()$' or '^(%x+)%.?(%x*)' .. part.numbers_end .. '$'
    part.span_us, part.span_rest = product_over(part.three, part.two, c)
  end
  part.at_us, part.after, part.is_new = now_us, nil, not value
  local full_us, full_rest = 0, 0
  if value then
    full_us, full_rest = string.match(value, part.own)
    if not full_us then return look_bucket_other(part) end
    if keeps_instant == 1 then
      full_us, full_rest = full_us + 0, 0
    else
      full_us, full_rest = tonumber(full_us, 16), full_rest == '' and 0 or tonumber(full_rest, 16)
    end
  elseif operation == 'known' and keeps_instant == 1 then
    error('TOLLGATE_FULL', 0)
  end
  local allowed
  allowed, part[1], part[2], part.after_us, part.after_rest =
    token_bucket_fit(full_us, full_rest, c, part.span_us, part.span_rest, part.price_us, part.price_rest, now_us)
  part.fresh_at_us, part.slack_us = full_us + 1, 1000000
  return allowed
end

make[1] = function(part)
  if part.after then return others_of_bucket().write(part.key, part.after, part.five) end
  local value
  if part.after_rest > 0 then
    value = format('%x.%x', part.after_us, part.after_rest) .. part.numbers_end
    set(part.key, value, part.after_us + 1, part.span_us)
  else
    value = part.five == 1 and format('%d', part.after_us) or format('%x', part.after_us) .. part.numbers_end
    set(part.key, value, part.after_us, part.span_us)
  end
end

adopt[1] = function(part)
  local others = others_of_bucket()
  local own = others.adopted(part.state, part.one, part.two, part.three, part.five, now_us)
  others.write(part.key, own, part.five)
end

look[2], make[2], adopt[2] = look[1], make[1], adopt[1]
