#!lua
-- Add to the hits of keys, and keep only the keys with the most.
-- KEYS: the hits of a namespace.
-- ARGV: how many keys to keep, life in seconds, then key, hits, key, hits ...
for i = 3, #ARGV, 2 do
  redis.call('ZINCRBY', KEYS[1], ARGV[i + 1], ARGV[i])
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -tonumber(ARGV[1]) - 1)
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
