#!lua flags=allow-oom
-- Take a node's location from a record; with the last one goes the record, and a tombstone says why.
-- KEYS: record, tombstone.
-- ARGV: raw key where the name is a hash, else "", location field, the value it must have or "",
--       reason, life of the tombstone in seconds, "1" where the record may have ended by itself.
-- Returns 1 where a location went, else 0.
-- allow-oom: withdrawing is what frees memory. It must work when there is none.
local record, gone = KEYS[1], KEYS[2]
local key, at, expected, reason, seconds, ended = unpack(ARGV)

local current = redis.call('HGET', record, at)
if not current and ended == '1' and redis.call('EXISTS', record) == 0 then
  -- It ended together with what it stood for, or was never written. An earlier reason stands.
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
