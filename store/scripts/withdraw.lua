#!lua flags=allow-oom
-- Remove a node's location from a record. The last one removes the record and writes a tombstone.
-- KEYS: record, tombstone.
-- ARGV: raw key if the name is a hash, else "", location field, the value it must have or "",
--       reason, life of the tombstone in seconds, "1" if the record may have expired.
-- Returns 1 if a location was removed, else 0.
-- allow-oom: withdrawing frees memory, so it must work when there is none.
local record, gone = KEYS[1], KEYS[2]
local key, at, expected, reason, seconds, ended = unpack(ARGV)

local current = redis.call('HGET', record, at)
if not current and ended == '1' and redis.call('EXISTS', record) == 0 then
  -- The record expired, or was never written. An earlier tombstone is kept.
  redis.call('SET', gone, reason, 'EX', seconds, 'NX')
end
if not current or (expected ~= '' and current ~= expected) then return 0 end
if key ~= '' and redis.call('HGET', record, 'key') ~= key then return 0 end

redis.call('HDEL', record, at, 'on:' .. string.sub(at, 4))
for _, field in ipairs(redis.call('HKEYS', record)) do
  if string.sub(field, 1, 3) == 'at:' then return 1 end
end
redis.call('DEL', record)
redis.call('SET', gone, reason, 'EX', seconds)
return 1
