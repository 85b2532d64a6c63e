-- Settles each hold of the call: the common way first, then any way. See settle.lua. A call that has met much answers for its first
-- holds alone.

local answers = {}
for index = 1, ARGV[3] + 0 do
  local is_sound, answer = true, nil
  if operation == 'forget' then
    answer = call('DEL', KEYS[index])
  else
    if operation == 'cancel' or operation == 'actual' or operation == 'release' then is_sound, answer = pcall(settle_lease, KEYS[index]) end
    if is_sound and not answer then is_sound, answer = pcall(others_of_settlement().settle, KEYS[index]) end
  end
  if not is_sound then
    -- Where the first fails the error itself is the answer.
    if index == 1 then error(answer, 0) end
    local text = type(answer) == 'table' and answer.err or answer
    local is_state = string.find(text, 'TOLLGATE_STATE', 1, true) or string.find(text, 'WRONGTYPE', 1, true)
    answer = {ok = is_state and 'STATE' or 'FAILED'}
  end
  answers[index] = answer
  if work > MOST_WORK then break end
end
return answers
