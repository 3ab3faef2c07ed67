"""Lookup Buffer: store a tensor under a key on one host, read it by that key on any other.

The public names of the library. Importing this module imports neither torch nor a Redis client:

    from lookup_buffer import BufferConfig, LookupBuffer, Namespace, TensorKey

    with LookupBuffer(BufferConfig(store_url="redis://…"), Namespace.named("photos")) as buffer:
        buffer.insert(TensorKey("a1b2"), tensor)
        tensor = buffer.select(TensorKey("a1b2"), timeout=5.0)
"""

import importlib
from importlib.machinery import PathFinder
from os.path import abspath, dirname, realpath

TYPE_CHECKING = False
"""As in `typing`, whose import would take longer than this whole module."""


def _refuse_another_store() -> None:
    """Raise ImportError if another `store` package would be imported instead of ours, which lies
    beside this package; a folder `store` in the working directory may precede it. The check does
    not import `store`: that would slow the import of this module, and so each command."""
    found = PathFinder.find_spec("store")
    if found is None:
        return  # a custom importer loads this package, not the path
    paths = list(found.submodule_search_locations or [found.origin or ""])
    # Compare both the given and the resolved path: a folder or its files may be symbolic links.
    ours = (dirname(dirname(abspath(__file__))), dirname(dirname(realpath(__file__))))
    if len(paths) > 1 or not {dirname(abspath(paths[0])), dirname(realpath(paths[0]))} & {*ours}:
        raise ImportError(
            f"another package named 'store' shadows lookup-buffer's: {paths}. Start Python from "
            "another directory, with `python -P`, or uninstall the other package"
        )


_refuse_another_store()

if TYPE_CHECKING:
    from typing import Any

    from lookup_buffer.client.buffer import EngineRank as EngineRank
    from lookup_buffer.client.buffer import LookupBuffer as LookupBuffer
    from lookup_buffer.client.handles import ClaimAnswer as ClaimAnswer
    from lookup_buffer.client.handles import LoadOrder as LoadOrder
    from lookup_buffer.client.handles import PrefetchHandle as PrefetchHandle
    from lookup_buffer.client.handles import PrefetchState as PrefetchState
    from lookup_buffer.config import BufferConfig as BufferConfig
    from lookup_buffer.errors import BufferFull as BufferFull
    from lookup_buffer.errors import LookupBufferError as LookupBufferError
    from lookup_buffer.errors import LookupTimeout as LookupTimeout
    from lookup_buffer.errors import MissingTensor as MissingTensor
    from lookup_buffer.errors import MissReason as MissReason
    from lookup_buffer.errors import NodeUnavailable as NodeUnavailable
    from lookup_buffer.key import TensorKey as TensorKey
    from lookup_buffer.namespace import Namespace as Namespace
    from lookup_buffer.protocol.messages import ClaimOutcome as ClaimOutcome
    from lookup_buffer.protocol.messages import InsertOutcome as InsertOutcome
    from store import BlockingStore as BlockingStore
    from store import ClaimState as ClaimState

_MODULES = {
    "store": (
        "ClaimState",
        "BlockingStore",
    ),
    "lookup_buffer.client.handles": (
        "ClaimAnswer",
        "LoadOrder",
        "PrefetchState",
        "PrefetchHandle",
    ),
    "lookup_buffer.client.buffer": (
        "EngineRank",
        "LookupBuffer",
    ),
    "lookup_buffer.config": ("BufferConfig",),
    "lookup_buffer.errors": (
        "BufferFull",
        "LookupBufferError",
        "LookupTimeout",
        "MissReason",
        "MissingTensor",
        "NodeUnavailable",
    ),
    "lookup_buffer.protocol.messages": ("ClaimOutcome", "InsertOutcome"),
    "lookup_buffer.key": ("TensorKey",),
    "lookup_buffer.namespace": ("Namespace",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> "Any":
    """Import a public name at its first use: the CLI and the node need no torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lookup_buffer' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"{name} needs torch, which is not installed: pip install torch"
        ) from error
