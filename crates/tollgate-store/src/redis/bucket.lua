-- The stored state of token and leaky buckets: a string of hexadecimal numbers. `full_us[.full_rest]`, then `+tokens.rest@at_us`
-- if a larger burst would have a larger deficit, then `~at_us/c/p` if the limit's numbers changed recently, then `/c/p/burst`,
-- the numbers of the limit that wrote it. A bucket that keeps its instant writes only full_us, in decimal, if that is enough.
-- Format 1 was full_us or full_us:full_rest, in decimal.

local function read_bucket(key)
  local value = call('GET', key)
  if not value then return {full_us = 0, full_rest = 0} end
  local full, more, c, p, burst = string.match(value, '^([%x.]+)([^/]*.-)/(%x+)/(%x+)/(%x+)$')
  if not full then
    local us, rest = string.match(value, '^(%d+):?(%d*)$')
    if not us then not_ours() end
    return {full_us = us + 0, full_rest = tonumber(rest) or 0}
  end
  local hex = function(digits) return tonumber(digits, 16) end
  local us, rest = string.match(full, '^(%x+)%.?(%x*)$')
  if not us then not_ours() end
  local state = {full_us = hex(us), full_rest = rest ~= '' and hex(rest) or 0, c = hex(c), p = hex(p), burst = hex(burst)}
  if state.c == 0 or state.p == 0 then not_ours() end
  if more ~= '' then
    local wider, changed = string.match(more, '^(%+?[%x.@]*)(~?[%x/]*)$')
    if not wider then not_ours() end
    if wider ~= '' then
      local tokens, part, at_us = string.match(wider, '^%+(%x+)%.(%x+)@(%x+)$')
      if not tokens then not_ours() end
      state.wider_tokens, state.wider_rest, state.wider_at_us = hex(tokens), hex(part), hex(at_us)
    end
    if changed ~= '' then
      local at_us, changed_c, changed_p = string.match(changed, '^~(%x+)/(%x+)/(%x+)$')
      if not at_us then not_ours() end
      state.changed_at_us, state.changed_c, state.changed_p = hex(at_us), hex(changed_c), hex(changed_p)
      if state.changed_c == 0 or state.changed_p == 0 then not_ours() end
    end
  end
  return state
end

local function write_bucket(key, state, keeps_instant)
  local value
  if keeps_instant == 1 and state.full_rest == 0 and not state.wider_tokens then
    value = format('%d', state.full_us)
  else
    value = format('%x', state.full_us)
    if state.full_rest > 0 then value = value .. format('.%x', state.full_rest) end
    if state.wider_tokens then
      value = value .. format('+%x.%x@%x', state.wider_tokens, state.wider_rest, state.wider_at_us)
    end
    if state.changed_at_us then
      value = value .. format('~%x/%x/%x', state.changed_at_us, state.changed_c, state.changed_p)
    end
    value = value .. format('/%x/%x/%x', state.c, state.p, state.burst)
  end
  local span_us = product_over(state.burst, state.p, state.c)
  set(key, value, math.max(token_bucket_fresh_at(state), now_us), span_us)
end
