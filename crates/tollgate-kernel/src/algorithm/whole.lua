-- Whole numbers in Lua: exact to 2^53 and not a step further.
--
-- What passes that bound is a product, and a product is only ever wanted divided. So the product itself is never made: its
-- quotient and rest are, digit by digit. Every other file of this folder adds and subtracts numbers below 2^53, and takes
-- rests with math.fmod, which is exact.

local EXACT = 9007199254740992

-- a * b / d, as the quotient rounded down and the rest, for whole numbers below 2^53 and d at most 2^49. A quotient that
-- passes 2^53 is not exact, only at least as large: who may get one compares it with a bound before using it.
local function product_over(a, b, d)
  local product = a * b
  if product < EXACT then
    local rest = math.fmod(product, d)
    return (product - rest) / d, rest
  end
  local whole, part = 0, b
  if b >= d then
    part = math.fmod(b, d)
    whole = (b - part) / d
  end
  -- Digits of a, the largest first, small enough that a rest below d, moved by one digit, stays exact.
  local base = 8
  if d < 68719476736 then base = 65536 end
  local power = 1
  while power * base <= a do power = power * base end
  local quotient, rest = 0, 0
  while power >= 1 do
    local lower = math.fmod(a, power)
    local digit = (a - lower) / power
    a, power = lower, power / base
    local carried = rest * base + digit * part
    rest = math.fmod(carried, d)
    quotient = quotient * base + digit * whole + (carried - rest) / d
  end
  return quotient, rest
end
