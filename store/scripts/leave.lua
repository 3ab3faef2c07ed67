#!lua flags=allow-oom
-- Strike a node off, unless another boot of it has come since.
-- KEYS: the nodes.  ARGV: node, boot.  Returns 1 where it went, else 0.
local current = redis.call('HGET', KEYS[1], ARGV[1])
if current and string.match(current, '^([^:]*):') == ARGV[2] then
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
