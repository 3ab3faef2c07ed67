"""What two pools say to each other over the pipe of their pair.

The end that connected asks; the end that listens answers, under keys that the question's number
makes. Both are small messages beside the payload, which goes through the communicator:

    question    without a key: {ask, pool, namespace, key, mark}; mark 0: a probe, to make the
                communicator before it is needed; with `at_sight` where nobody needs it as yet:
                whoever has many already ends that pair instead
    verdict     under `v<ask>`: {status: ok or stale, header}
    payload     under `p<ask>`, where the status is ok
"""

from typing import Any, Final

import torch

from lookup_buffer.codec import Value, writable_bytes
from lookup_buffer.errors import ProtocolError
from lookup_buffer.plain import pack, unpack

QUESTION_BYTES_MAX: Final = 64 << 10
INBOX_BYTES: Final = 4 << 20
"""Of what the other end sent and nobody here asked for, or not yet; ends that do as this module
says have a fraction of it under way."""
PROBE_BYTES: Final = 128 << 10
"""More than what comes with its offer: so it takes the communicator."""


def message(fields: dict[str, Any]) -> torch.Tensor:
    """Fields as a value that a pipe carries."""
    return torch.frombuffer(bytearray(pack(fields)), dtype=torch.uint8)


def fields_in(value: Value) -> dict[str, Any]:
    """The reverse.

    Raises:
        ProtocolError: it is nothing of that kind.
    """
    if value is None or value.dtype != torch.uint8 or value.dim() != 1:
        raise ProtocolError("that is neither a question nor a verdict")
    host = value.cpu()
    fields = unpack(writable_bytes(host))
    if not isinstance(fields, dict):
        raise ProtocolError("that is neither a question nor a verdict")
    return fields


def verdict_key(ask: int) -> str:
    return f"v{ask}"


def payload_key(ask: int) -> str:
    return f"p{ask}"
