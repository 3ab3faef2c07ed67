#!lua
-- Add to a node's counters. One that would overflow stays at the most that the server can count. One
-- with a foreign value keeps it, the others are counted, and the reply is that error.
-- KEYS: the counters of a node.  ARGV: life in seconds, then name, increment, name, increment ...
local failed
for i = 2, #ARGV, 2 do
  local reply = redis.pcall('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
  local err = type(reply) == 'table' and reply.err
  if err and string.find(err, 'overflow', 1, true) then
    redis.call('HSET', KEYS[1], ARGV[i], '9223372036854775807')
  elseif err and string.find(err, 'WRONGTYPE', 1, true) then
    return reply
  elseif err then
    failed = reply
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return failed or 1
