"""What of an engine's settings everybody may read who reads Redis. Pure.

A namespace is published in clear text. Of a credential, or what is named like one, a digest stays,
and of a path on this machine its last part and a digest: what differs goes on to differ.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

_SECRET = re.compile(r"(?:^|[_-])(?:key|token|secret|password|passwd|credentials?|auth)s?$", re.I)
_USER = re.compile(r"(?<=://)[^/@]*@")
_DIGITS = 16


def disclosed(value: Any) -> Any:
    """`value`, however nested, as it may be read by others. Equal for equal values."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {
            key: _withheld(member) if _SECRET.search(str(key)) else disclosed(member)
            for key, member in value.items()
        }
    if isinstance(value, list | tuple):
        return [disclosed(member) for member in value]
    if isinstance(value, set | frozenset):
        return {disclosed(member) for member in value}
    return value


def _text(text: str) -> str:
    if text.startswith(("/", "~", "file:")):
        name = text.rstrip("/").rpartition("/")[2]
        return f"{name} (path {_digest(text)})"
    if _USER.search(text):
        return f"{_USER.sub('', text)} (login {_digest(text)})"
    return text


def _withheld(value: Any) -> str:
    return f"(withheld {_digest(repr(value))})" if value else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
