#!lua
-- Add a node's location to the record of a key, and release the publisher's claim.
-- KEYS: record, claim, tombstone.
-- ARGV: 1 location field, 2 location value, 3 TTL in ms, 4 claim token or "",
--       5 most locations allowed, 6 created, 7 "sole" or "", 8 device location or "",
--       9 hardware that computed it or "",
--       10 ... the identity of the record as field, value, field, value ...
-- Returns "added", "present", "full", "owned" or "conflict"; see Publication.
-- Without allow-oom: when memory is full, a new location is what we can do without.
local record, claim, gone = KEYS[1], KEYS[2], KEYS[3]
local at, location, ttl, token, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local sole, device = ARGV[7] == 'sole', ARGV[8]

-- Split boot:generation:checksum; nil for another text.
local function parse(value)
  return string.match(value, '^(%w+):(%d+):(%x+)$')
end

-- Whether another node holds it. A checksum of zeros is an offer, still waiting for admission.
local function owned()
  for _, field in ipairs(redis.call('HKEYS', record)) do
    if string.sub(field, 1, 3) == 'at:' and field ~= at then
      local _, _, checksum = parse(redis.call('HGET', record, field))
      if checksum and string.match(checksum, '[^0]') then return true end
    end
  end
  return false
end

local known = redis.call('EXISTS', record) == 1
local garbled, differs = false, false
if known then
  for i = 10, #ARGV, 2 do
    local value = redis.call('HGET', record, ARGV[i])
    if not value then
      garbled = true
      break
    elseif value ~= ARGV[i + 1] then
      if not sole or ARGV[i] == 'key' or ARGV[i] == 'v' then return 'conflict' end
      differs = true
    end
  end
  if sole and not garbled and owned() then return 'owned' end
end
if garbled or differs then
  -- Garbled: it is a miss for readers already, so replace it instead of waiting for its expiry.
  -- Differs: a sole key whose earlier value was this node's, or an offer; it is replaced.
  redis.call('DEL', record)
  known = false
end

local outcome = 'added'
local current = known and redis.call('HGET', record, at)
if current then
  local boot, generation = parse(location)
  local current_boot, current_generation = parse(current)
  -- A late publication must not bring back a generation that the node has already replaced.
  if current_boot == boot and tonumber(current_generation) >= tonumber(generation) then
    outcome = 'present'
  end
elseif known then
  local copies = 0
  for _, field in ipairs(redis.call('HKEYS', record)) do
    if string.sub(field, 1, 3) == 'at:' then copies = copies + 1 end
  end
  if copies >= most then outcome = 'full' end
end

if outcome ~= 'full' then
  if not known then redis.call('HSET', record, 'created', ARGV[6], unpack(ARGV, 10)) end
  if not known and ARGV[9] ~= '' then redis.call('HSET', record, 'device', ARGV[9]) end
  if outcome == 'added' then redis.call('HSET', record, at, location) end
  if outcome == 'added' or current == location then
    -- Write only what differs: each write is pushed to all connections that have read the record.
    local on = 'on:' .. string.sub(at, 4)
    local there = redis.call('HGET', record, on) or ''
    if device == '' and there ~= '' then redis.call('HDEL', record, on) end
    if device ~= '' and there ~= device then redis.call('HSET', record, on, device) end
  end
  -- A location with little time left must not shorten the life of the others. A renewal in the
  -- first half of the life writes nothing, as above.
  local left = redis.call('PTTL', record)
  if left < ttl / 2 or (outcome == 'added' and left < ttl) then
    redis.call('PEXPIRE', record, ttl)
  end
  redis.call('DEL', gone)
end

if token ~= '' then
  local held = redis.pcall('GET', claim)
  local ours = type(held) == 'string' and string.match(held, ':([^:]*)$') == token
  if ours then redis.call('DEL', claim) end
end
return outcome
