"""Lookup Buffer: put a tensor under a key on one host, get it by that key on any other.

Everything a library user needs is here; importing it costs neither torch nor Redis:

    from lookup_buffer import BufferConfig, LookupBuffer, Namespace, TensorKey

    with LookupBuffer(BufferConfig(store_url="redis://…"), Namespace.named("photos")) as buffer:
        buffer.insert(TensorKey("a1b2"), tensor)
        tensor = buffer.select(TensorKey("a1b2"), timeout=5.0)
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    from store import ClaimState as ClaimState
    from store import MetadataStore as MetadataStore
except ImportError as error:
    import store

    where = getattr(store, "__file__", None) or list(getattr(store, "__path__", []))
    raise ImportError(
        f"another package named 'store' shadows lookup-buffer's: {where}. Start Python from "
        "another directory, with `python -P`, or uninstall the other package"
    ) from error

if TYPE_CHECKING:
    from lookup_buffer.claimed import ClaimAnswer as ClaimAnswer
    from lookup_buffer.claimed import ClaimOutcome as ClaimOutcome
    from lookup_buffer.client import EngineSeat as EngineSeat
    from lookup_buffer.client import InsertOutcome as InsertOutcome
    from lookup_buffer.client import LookupBuffer as LookupBuffer
    from lookup_buffer.config import BufferConfig as BufferConfig
    from lookup_buffer.errors import BufferFull as BufferFull
    from lookup_buffer.errors import LookupBufferError as LookupBufferError
    from lookup_buffer.errors import LookupTimeout as LookupTimeout
    from lookup_buffer.errors import MissingTensor as MissingTensor
    from lookup_buffer.errors import NodeUnavailable as NodeUnavailable
    from lookup_buffer.key import TensorKey as TensorKey
    from lookup_buffer.namespace import Namespace as Namespace
    from lookup_buffer.prefetched import LoadOrder as LoadOrder
    from lookup_buffer.prefetched import Prefetched as Prefetched
    from lookup_buffer.prefetched import PrefetchState as PrefetchState

_HOMES = {
    "claimed": ("ClaimAnswer", "ClaimOutcome"),
    "client": ("EngineSeat", "InsertOutcome", "LookupBuffer"),
    "config": ("BufferConfig",),
    "errors": (
        "BufferFull",
        "LookupBufferError",
        "LookupTimeout",
        "MissingTensor",
        "NodeUnavailable",
    ),
    "key": ("TensorKey",),
    "namespace": ("Namespace",),
    "prefetched": ("LoadOrder", "PrefetchState", "Prefetched"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["ClaimState", "MetadataStore", *_HOME_OF]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: the CLI and the node need no torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lookup_buffer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lookup_buffer.{_HOME_OF[name]}"), name)
