#!lua flags=allow-oom
-- Remove a node, unless another boot of it is registered by now.
-- KEYS: the nodes.  ARGV: node, boot.  Returns 1 if it was removed, else 0.
local current = redis.call('HGET', KEYS[1], ARGV[1])
if current and string.match(current, '^([^:]*):') == ARGV[2] then
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
