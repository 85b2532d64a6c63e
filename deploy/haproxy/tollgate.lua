-- Asks Tollgate whether a client's request fits, and notes the answer for haproxy.cfg.
local gate = "http://127.0.0.1:8080/v1/gate/api/"

core.register_action("tollgate", { "http-req" }, function(txn)
  local answer = core.httpclient():get({ url = gate .. txn.f:src() .. "?as=ip", timeout = 500 })
  if not answer or not answer.headers then return end
  local standing, retry = answer.headers["ratelimit"], answer.headers["retry-after"]
  if standing then txn:set_var("txn.tollgate_standing", standing[0]) end
  if answer.status == 429 then
    txn:set_var("txn.tollgate_denied", true)
    txn:set_var("txn.tollgate_retry", retry and retry[0] or "")
  end
end, 0)
