-- Asks Tollgate whether a request fits its limits, and notes the answer for haproxy.cfg. Tollgate applies the [[routes]] of its
-- config, which must trust HAProxy: see deploy/tollgate.toml.
--
-- Only a 2xx lets a request pass. Whatever else comes, or nothing in time, leaves `tollgate_allowed` unset, and haproxy.cfg then
-- refuses: with 429 where the client is over its limit, and with 503 where nobody could decide.
local gate = "http://127.0.0.1:8080/v1/gate"

-- Headers of the client that must not come along: those that describe the request, and those of its body and connection.
local dropped = {
  ["x-original-method"] = true, ["x-original-uri"] = true, ["x-forwarded-method"] = true, ["x-forwarded-uri"] = true,
  ["x-forwarded-for"] = true, ["x-forwarded-host"] = true, ["content-length"] = true, ["transfer-encoding"] = true,
  ["connection"] = true, ["expect"] = true, ["te"] = true, ["upgrade"] = true, ["host"] = true,
}

core.register_action("tollgate", { "http-req" }, function(txn)
  local described = {
    ["x-original-method"] = { txn.f:method() },
    ["x-original-uri"] = { txn.f:pathq() },
    ["x-forwarded-for"] = { txn.f:src() },
    ["host"] = { txn.f:req_hdr("host") or "" },
  }
  for name, values in pairs(txn.http:req_get_headers()) do
    if not dropped[name] then
      local list = {}
      for index = 0, #values do list[#list + 1] = values[index] end
      described[name] = list
    end
  end
  local answer = core.httpclient():get({ url = gate, headers = described, timeout = 500 })
  if not answer or not answer.status then return end
  local headers = answer.headers or {}
  local quota, retry = headers["ratelimit"], headers["retry-after"]
  if quota then txn:set_var("txn.tollgate_quota", quota[0]) end
  if retry then txn:set_var("txn.tollgate_retry", retry[0]) end
  if answer.status >= 200 and answer.status < 300 then
    txn:set_var("txn.tollgate_allowed", true)
  elseif answer.status == 429 then
    txn:set_var("txn.tollgate_denied", true)
  end
end, 0)
