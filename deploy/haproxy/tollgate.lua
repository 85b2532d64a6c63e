-- Asks Tollgate whether a client's request fits, and notes the answer for haproxy.cfg.
--
-- Only an answer of 2xx lets a request pass. Whatever else comes, or nothing in time, leaves `tollgate_allowed` unset, and
-- haproxy.cfg then refuses: with 429 where the client is over its limit, and with 503 where nobody could say.
local gate = "http://127.0.0.1:8080/v1/gate/api/"

core.register_action("tollgate", { "http-req" }, function(txn)
  local answer = core.httpclient():get({ url = gate .. txn.f:src() .. "?as=ip", timeout = 500 })
  if not answer or not answer.status then return end
  local headers = answer.headers or {}
  local standing, retry = headers["ratelimit"], headers["retry-after"]
  if standing then txn:set_var("txn.tollgate_standing", standing[0]) end
  if retry then txn:set_var("txn.tollgate_retry", retry[0]) end
  if answer.status >= 200 and answer.status < 300 then
    txn:set_var("txn.tollgate_allowed", true)
  elseif answer.status == 429 then
    txn:set_var("txn.tollgate_denied", true)
  end
end, 0)
