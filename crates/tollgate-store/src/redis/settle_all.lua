-- Settles each hold of the call: the fast path first (short_settle.lua), then the general one (settle.lua). A call with much work
-- answers only its first holds.

local answers = {}
-- The operations for which a hold of one lease has a fast path.
local is_short = operation == 'cancel' or operation == 'actual' or operation == 'release'
local function text_of(failure) return type(failure) == 'table' and failure.err or failure end

for index = 1, count do
  local is_sound, answer = true, nil
  holder = ARGV[4 + index]
  if operation == 'forget' then
    answer = call('DEL', KEYS[index])
  else
    if is_short then
      is_sound, answer = pcall(settle_lease, KEYS[index])
      -- The fast path wrote nothing if there is no memory, or if a hold has an unexpected content: the general path decides.
      local text = not is_sound and text_of(answer)
      if text and (find(text, 'OOM', 1, true) or find(text, 'user_script:%d')) then is_sound, answer = true, nil end
    end
    if is_sound and not answer then is_sound, answer = pcall(others_of_settlement().settle, KEYS[index]) end
  end
  if not is_sound then
    -- An error of one hold, or of a key that it charged, is the answer of this hold alone.
    local text = text_of(answer)
    local function says(word) return find(text, word, 1, true) end
    if says('TOLLGATE_STATE') or says('WRONGTYPE') then
      answer = {ok = 'STATE'}
    elseif says('OOM') then
      -- Redis refuses no write for lack of memory once a script has written.
      answer = {ok = 'FULL'}
    elseif has_written or find(text, 'user_script:%d') then
      answer = {ok = 'FAILED'}
    else
      -- The server serves no call now, and nothing was written: the error is the answer of the whole call.
      error(answer, 0)
    end
  elseif answer == 'DONE' then
    has_written = true
  end
  answers[index] = answer
  if work > MOST_WORK then break end
end
return answers
