-- A chat request with a 200-byte prompt.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"messages":[{"role":"user","content":"' .. string.rep("four score", 20) .. '"}],"max_tokens":64}'
