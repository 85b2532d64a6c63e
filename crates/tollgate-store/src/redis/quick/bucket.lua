-- Fast path of a bucket whose state is only an instant under the limit's own numbers. any_bucket.lua charges all others.

--- constants
local c_N, p_N, burst_N, keeps_instant_N = ARGV[at_N + 5] + 0, ARGV[at_N + 6] + 0, ARGV[at_N + 7] + 0, ARGV[at_N + 9] == '1'
local price_us_N, price_rest_N = ARGV[at_N + 3] + 0, ARGV[at_N + 4] + 0
local numbers_N = format('/%x/%x/%x', c_N, p_N, burst_N)
local whole_N, cut_N, span_us_N, span_rest_N = '%x' .. numbers_N, -#numbers_N - 1, product_over(burst_N, p_N, c_N)
local late_us_N = (span_us_N < 1000000 and span_us_N or 1000000) + 1000 + 1000 * shift_ms

--- look
local full_us_N, full_rest_N = 0, 0
if value_N then
  if type(value_N) ~= 'string' then break end
  if keeps_instant_N then
    if not find(value_N, '^%d+$') then break end
    full_us_N = value_N + 0
  else
    if sub(value_N, cut_N + 1) ~= numbers_N then break end
    local instant = sub(value_N, 1, cut_N)
    full_us_N = tonumber(instant, 16)
    if not full_us_N then
      full_us_N, full_rest_N = match(instant, '^(%x+)%.(%x+)$')
      if not full_us_N then break end
      full_us_N, full_rest_N = tonumber(full_us_N, 16), tonumber(full_rest_N, 16)
    end
  end
elseif keeps_instant_N and operation == 'known' then
  break
end
local allowed_N, missing_us_N, missing_rest_N, after_us_N, after_rest_N =
  token_bucket_fit(full_us_N, full_rest_N, c_N, span_us_N, span_rest_N, price_us_N, price_rest_N, now_us)
local counts_from_us_N, fresh_at_us_N, slack_us_N = now_us, full_us_N + 1, 1000000

--- found
missing_us_N, missing_rest_N

--- answer
pack('>I7I7', missing_us_N, missing_rest_N)

--- make
local new_N, until_us_N = nil, after_us_N
if after_rest_N > 0 then
  new_N, until_us_N = format('%x.%x', after_us_N, after_rest_N) .. numbers_N, after_us_N + 1
else
  new_N = keeps_instant_N and format('%d', after_us_N) or format(whole_N, after_us_N)
end
local ms_N = format('%d', (until_us_N + late_us_N) / 1000)
