#!lua
-- Take the right to produce a key, or ask for it again with the same token.
-- KEYS: claim, record.  ARGV: holder, token (without a colon), state, lease in ms.
-- Anything of another type under the claim's name was not written by us: taken over as well.
-- Returns granted (0 or 1), the holder, its state, the ms left, and the record as fields and values.
local claim, record = KEYS[1], KEYS[2]
local holder, token, state, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

-- Read in here, so that no publication can come between the decision and the reading. A key that
-- holds something foreign is no record.
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
  -- A claim that never ends, or that we cannot read, was not written by us: take it over.
  if readable and left >= 0 then
    if current_token ~= token then return answer(0, current_holder, current_state, left) end
    -- Since when it is in this state is said by the holder's text: the first one stays.
    if current_state == state then holder = current_holder end
    -- To mean it once more is no progress: it neither renews the lease nor takes anything back.
    if state == 'intent' then return answer(1, current_holder, current_state, left) end
  end
end
redis.call('SET', claim, holder .. ':' .. state .. ':' .. token, 'PX', lease)
return answer(1, holder, state, lease)
