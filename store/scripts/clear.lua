#!lua flags=allow-oom
-- Remove a record with all its locations, and write a tombstone.
-- KEYS: record, tombstone.  ARGV: the tombstone's text, its life in seconds.
-- Returns 1 if there was a record, else 0.
-- allow-oom: it frees more than it takes.
local there = redis.call('DEL', KEYS[1])
if there == 1 then redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2]) end
return there
