#!lua flags=allow-oom
-- A node's sign of life.
-- KEYS: the nodes.  ARGV: node, boot, sequence, the beat of another boot to replace or "".
-- Returns 1 where this boot of the node was known, 0 where it beats for the first time or the
-- server has lost its data, and the other's beat where another boot stands there: nothing changed.
-- allow-oom: a server without memory must not make its nodes look dead.
local nodes, node, boot, sequence, replacing = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local previous = redis.call('HGET', nodes, node)
local current_boot, current_sequence
if previous then current_boot, current_sequence = string.match(previous, '^(%w+):(%d+)$') end
-- What nobody can read (see layout.read_beat) takes no id.
local readable = current_boot and #current_sequence <= 19
if readable and current_boot ~= boot and previous ~= replacing then return previous end
redis.call('HSET', nodes, node, boot .. ':' .. sequence)
if current_boot == boot then return 1 end
return 0
