#!lua flags=allow-oom
-- Write a node's heartbeat.
-- KEYS: the nodes.  ARGV: node, boot, sequence, the beat of another boot to replace or "".
-- Returns 1 if this boot of the node was registered, 0 at its first beat or after the server lost
-- its data. If another boot is registered, returns that boot's beat and changes nothing.
-- allow-oom: a server without memory must not make its nodes look dead.
local nodes, node, boot, sequence, replacing = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local previous = redis.call('HGET', nodes, node)
local current_boot, current_sequence
if previous then current_boot, current_sequence = string.match(previous, '^(%w+):(%d+)$') end
-- A garbled beat (see layout.read_beat) does not reserve the node id.
local readable = current_boot and #current_boot <= 24 and #current_sequence <= 19
  and (current_sequence == '0' or string.sub(current_sequence, 1, 1) ~= '0')
if readable and current_boot ~= boot and previous ~= replacing then return previous end
redis.call('HSET', nodes, node, boot .. ':' .. sequence)
if current_boot == boot then return 1 end
return 0
