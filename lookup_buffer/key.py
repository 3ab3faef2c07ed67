"""Keys: the names of tensors, and their canonical text.

The text form is used in frames, in Redis and in log lines: printable ASCII stays readable, and the
form is always reversible. Pure data; any thread.
"""

import re
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.errors import InvalidKey

MAX_KEY_CHARACTERS: Final = 4096
"""Bound on the canonical text; with it, a frame of many keys stays within the frame's bound."""

# Not escaped: printable ASCII (space included) except the escape and the two separators.
_UNSAFE: Final = re.compile(r"[^ -~]|[%#@]")
_PIECE: Final = r"(?:[ -\"$&-?A-~]|%[0-9A-F]{2})"
_TEXT: Final = re.compile(rf"({_PIECE}+)(?:#({_PIECE}+))?(?:@({_PIECE}+))?")
_ESCAPES: Final = re.compile(r"(?:%[0-9A-F]{2})+")

QualifiedKey = tuple[str, str]
"""(namespace fingerprint, key text): the name of an item within the whole fleet."""


@dataclass(frozen=True, slots=True)
class TensorKey:
    """The name of one tensor within a namespace.

    With `request_id=None` the key is *shared*: it names content, which never changes, for many
    readers. With a request id it is a *hand-off* from one producer to one consumer. `part`
    distinguishes the tensors of one item (a layer, a hidden state).

    Keys match exactly; there is no order and no prefix rule.

    Raises:
        InvalidKey: a piece is not a string, `mm_hash` or `request_id` is empty, or the text would
            be longer than `MAX_KEY_CHARACTERS`.
    """

    mm_hash: str
    request_id: str | None = None
    part: str = ""
    text: str = field(init=False, repr=False, compare=False)
    """The canonical text, `mm_hash[#part][@request_id]`, percent-encoded piece by piece. ASCII."""

    def __post_init__(self) -> None:
        text = _escaped("mm_hash", self.mm_hash)
        if not text:
            raise InvalidKey("mm_hash is empty")
        if self.part != "":
            text += "#" + _escaped("part", self.part)
        if self.request_id is not None:
            if self.request_id == "":
                raise InvalidKey("request_id is empty; use None for the shared scope")
            text += "@" + _escaped("request_id", self.request_id)
        if len(text) > MAX_KEY_CHARACTERS:
            raise InvalidKey(
                f"the key's text has {len(text)} characters; allowed: {MAX_KEY_CHARACTERS}"
            )
        object.__setattr__(self, "text", text)

    @property
    def is_shared(self) -> bool:
        """Whether this key names content for many readers, not a hand-off."""
        return self.request_id is None

    @classmethod
    def parse(cls, text: str) -> "TensorKey":
        """The key with exactly this canonical text.

        A text that decodes but is not canonical (with an unnecessary escape) is refused: two texts
        for one key would be two entries in Redis.

        Raises:
            InvalidKey: not the canonical text of any key.
        """
        if len(text) > MAX_KEY_CHARACTERS:
            raise InvalidKey(f"a key's text has at most {MAX_KEY_CHARACTERS} characters")
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InvalidKey(f"not a key: {text!r}")
        mm_hash, part, request_id = match.groups()
        key = cls(
            _unescaped(mm_hash),
            None if request_id is None else _unescaped(request_id),
            "" if part is None else _unescaped(part),
        )
        if key.text != text:
            raise InvalidKey(f"not the canonical text of a key: {text!r}, but {key.text!r} is")
        return key

    def __str__(self) -> str:
        return self.text


def is_handoff(text: str) -> bool:
    """Whether a canonical text names a hand-off: only then does it contain an '@'."""
    return "@" in text


def _escaped(name: str, piece: object) -> str:
    if not isinstance(piece, str):
        raise InvalidKey(f"{name} is a {type(piece).__name__}, not a str")
    if _UNSAFE.search(piece) is None:
        return piece
    return _UNSAFE.sub(_escape, piece)


def _escape(match: re.Match[str]) -> str:
    # surrogatepass: a lone surrogate is legal in a str and must be restored unchanged.
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def _unescaped(piece: str) -> str:
    if "%" not in piece:
        return piece
    return _ESCAPES.sub(_unescape, piece)


def _unescape(match: re.Match[str]) -> str:
    try:
        return bytes.fromhex(match[0].replace("%", "")).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise InvalidKey(f"not a key: {match[0]!r} is not UTF-8") from error
