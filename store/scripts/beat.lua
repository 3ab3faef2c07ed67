#!lua flags=allow-oom
-- A node's sign of life.
-- KEYS: the nodes.  ARGV: node, boot, sequence.
-- Returns 1 where this boot of the node was known, else 0: it beats for the first time, or the
-- server has lost its data.
-- allow-oom: a server without memory must not make its nodes look dead.
local previous = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ':' .. ARGV[3])
if previous and string.match(previous, '^([^:]*):') == ARGV[2] then return 1 end
return 0
