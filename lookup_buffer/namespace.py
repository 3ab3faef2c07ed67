"""Namespace: the fingerprint of everything that determines the bytes beside the key.

In one namespace, equal keys mean equal tensors; its users are responsible for that. The parts are
published in clear text beside the fingerprint, so that two namespaces can be compared. Pure data;
any thread.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from lookup_buffer.errors import ConfigError
from lookup_buffer.protocol.fields import PARTS_MAX, TEXT_MAX, is_parts


@dataclass(frozen=True)
class Namespace:
    """Named parts and their fingerprint (64 hex characters, never truncated).

    The order of the parts does not matter; any difference in a name or a value does.

    Raises:
        ConfigError: a part is not a text or has an empty name, or there are too many parts.
    """

    parts: Mapping[str, str]
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        if not is_parts(dict(self.parts)):
            raise ConfigError(
                f"the parts of a namespace are up to {PARTS_MAX} texts under names of 1 to "
                f"{TEXT_MAX} characters"
            )
        canonical = json.dumps(dict(self.parts), sort_keys=True, ensure_ascii=True)
        object.__setattr__(self, "parts", dict(self.parts))
        object.__setattr__(self, "fingerprint", hashlib.sha256(canonical.encode()).hexdigest())

    @classmethod
    def named(cls, name: str) -> "Namespace":
        """The namespace of a library user, identified by a name of their choice only."""
        return cls({"name": name})

    def __hash__(self) -> int:
        return hash(self.fingerprint)
