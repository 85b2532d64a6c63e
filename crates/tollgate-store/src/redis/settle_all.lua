-- Settles each hold of the call: the common way first, then any way. See settle.lua. A call that has met much answers for its first
-- holds alone.

local answers, has_written = {}, false
for index = 1, ARGV[3] + 0 do
  local is_sound, answer = true, nil
  if operation == 'forget' then
    answer = call('DEL', KEYS[index])
  else
    if operation == 'cancel' or operation == 'actual' or operation == 'release' then is_sound, answer = pcall(settle_lease, KEYS[index]) end
    if is_sound and not answer then is_sound, answer = pcall(others_of_settlement().settle, KEYS[index]) end
  end
  if not is_sound then
    -- What is wrong with one hold, or with a key that it charged, is the answer of this hold alone.
    local text = type(answer) == 'table' and answer.err or answer
    local function says(word) return string.find(text, word, 1, true) end
    if says('TOLLGATE_STATE') or says('WRONGTYPE') then
      answer = {ok = 'STATE'}
    elseif says('OOM') then
      -- Redis refuses no write for lack of room once a script has written.
      answer = {ok = 'FULL'}
    elseif has_written or string.find(text, 'user_script:%d') then
      answer = {ok = 'FAILED'}
    else
      -- The server serves nobody now, and nothing was written: the error itself is the answer.
      error(answer, 0)
    end
  elseif type(answer) == 'table' and answer[1] == 'DONE' then
    has_written = true
  end
  answers[index] = answer
  if work > MOST_WORK then break end
end
return answers
