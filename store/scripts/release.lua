#!lua flags=allow-oom
-- Give up a claim, if the token is still the one that holds it.
-- KEYS: claim.  ARGV: token.  Returns 1 where the claim went, else 0.
-- allow-oom: others wait for it.
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'string' and string.match(held, ':([^:]*)$') == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
