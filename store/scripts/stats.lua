#!lua
-- Add to a node's counters.
-- KEYS: the counters of a node.  ARGV: life in seconds, then name, increment, name, increment ...
for i = 2, #ARGV, 2 do
  redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
