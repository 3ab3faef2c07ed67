#!lua flags=allow-oom
-- Release a claim, if the token still holds it.
-- KEYS: claim.  ARGV: token.  Returns 1 if the claim was released, else 0.
-- allow-oom: others wait for the claim.
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'string' and string.match(held, ':([^:]*)$') == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
