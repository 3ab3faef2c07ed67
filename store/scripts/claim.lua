#!lua
-- Acquire the claim of a key, or renew it with the same token.
-- KEYS: claim, record.  ARGV: holder, token (without a colon), state, lease in ms.
-- A value of another type under the claim's name was not written by us: it is overwritten.
-- Returns granted (0 or 1), the holder, its state, the ms left, and the record as fields and values.
local claim, record = KEYS[1], KEYS[2]
local holder, token, state, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

-- The record is read in the same script, so no publication can happen between decision and read.
-- A record of another type reads as empty.
local function answer(granted, by, in_state, left)
  local fields = redis.pcall('HGETALL', record)
  return {granted, by, in_state, left, fields.err and {} or fields}
end

local held = redis.pcall('GET', claim)
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then return held end
if type(held) == 'string' then
  local current_holder, current_state, current_token = string.match(held, '^(.*):(%l+):([^:]*)$')
  local left = redis.call('PTTL', claim)
  local readable = current_state == 'intent' or current_state == 'encoding'
  -- A claim without expiry, or a garbled one, was not written by us: it is overwritten.
  if readable and left >= 0 then
    if current_token ~= token then return answer(0, current_holder, current_state, left) end
    -- The holder's text has the time when the claim entered this state: the first one is kept.
    if current_state == state then holder = current_holder end
    -- A repeated INTENT is no progress: it does not renew the lease, nor reset the state.
    if state == 'intent' then return answer(1, current_holder, current_state, left) end
  end
end
redis.call('SET', claim, holder .. ':' .. state .. ':' .. token, 'PX', lease)
return answer(1, holder, state, lease)
