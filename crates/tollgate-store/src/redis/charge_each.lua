  -- The end of the loop that charging.rs began: makes the charges that the fast path did not make, or reports why not.
  if not answer then
    local is_sound, reply, is_made = pcall(others_of_charge().charge, before)
    if is_sound then
      answer, passed = reply, is_made
    else
      local text = type(reply) == 'table' and reply.err or reply
      -- An error of one charge, or of one of its keys, is the answer of this charge alone.
      local function says(word) return find(text, word, 1, true) end
      if says('TOLLGATE_STATE') or says('WRONGTYPE') then
        answer = {ok = 'STATE'}
      elseif says('TOLLGATE_FULL') or says('OOM') then
        if says('OOM') then has_room = false end
        answer = {ok = 'FULL'}
      elseif has_written or find(text, 'user_script:%d') then
        answer = {ok = 'FAILED'}
      else
        error(reply, 0)
      end
    end
  end
  has_written = has_written or passed
  answers[charge + 1] = answer
  if work > MOST_WORK then break end
end
return answers
