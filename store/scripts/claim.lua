#!lua
-- Take the right to produce a key, or renew it with the same token.
-- KEYS: claim.  ARGV: holder, token (without a colon), lease in ms.
-- Returns granted (0 or 1), the holder, and the ms left.
local claim, holder, token, lease = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])

local held = redis.call('GET', claim)
if held then
  local current_holder, current_token = string.match(held, '^(.*):([^:]*)$')
  local left = redis.call('PTTL', claim)
  -- A claim that never ends, or that we cannot read, was not written by us: take it over.
  if current_token and current_token ~= token and left >= 0 then
    return {0, current_holder, left}
  end
end
redis.call('SET', claim, holder .. ':' .. token, 'PX', lease)
return {1, holder, lease}
