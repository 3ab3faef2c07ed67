"""The namespace that an engine with some configuration comes to, for tests that need to know it."""

import tempfile
from pathlib import Path
from typing import Any

from connectors.namespace import Identity, Naming, engine_identity
from connectors.settings import SharedSettings
from connectors.weights import DigestCache
from lookup_buffer.errors import MissReason
from lookup_buffer.namespace import Namespace
from nodes import wait_until

HASHED_SECONDS = 60.0


def namespace_of(identity: Identity) -> Namespace:
    """With the weights hashed anew."""
    with tempfile.TemporaryDirectory() as directory:
        naming = Naming(identity, cache=DigestCache(Path(directory)))
        namespace = when_settled(naming)
        naming.close()
    assert namespace is not None, naming.reason
    return namespace


def when_settled(naming: Naming) -> Namespace | None:
    """The namespace, once it is known; None where it cannot be told."""
    wait_until(
        lambda: naming.namespace or naming.reason != MissReason.NAMESPACE_PENDING, HASHED_SECONDS
    )
    return naming.namespace


def engine_namespace(vllm_config: Any, settings: SharedSettings) -> Namespace:
    return namespace_of(engine_identity(vllm_config, settings))
