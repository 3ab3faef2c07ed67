"""How an engine comes by its namespace: at once, or when its weights have been hashed.

`identify` is called before the model is loaded, `Naming` by the scheduler's side afterwards. Where
scheduler and worker share a process they share the configuration's objects too, and a model may
change its own configuration while it loads: so the worker, which comes first, leaves its answer.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from connectors.counters import logger
from connectors.weights import WeightsSource
from connectors.weights_digest import DigestCache, Stopped, combined, hash_files
from lookup_buffer.errors import MissReason
from lookup_buffer.namespace import Namespace

CLOSE_SECONDS = 2.0
AT_ONCE_BYTES = 32 << 20
"""Hashed before the engine starts, which takes some hundredths of a second."""
_CHANGED = "the model's files changed while the engine started"


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine is known by, as far as that can be told before the model is loaded."""

    parts: dict[str, str]
    """Of the namespace, but for the weights."""
    weights: WeightsSource


def remembered(owner: Any, name: str, make: Callable[[], Identity]) -> Identity:
    """What `make` returned the first time for this object of vLLM's configuration."""
    identity: Identity | None = getattr(owner, name, None)
    if identity is None:
        identity = make()
        object.__setattr__(owner, name, identity)
    return identity


class Naming:
    """The scheduler side's. `close` ends the hashing. Logs one line when the namespace is known, or
    why it will not be.

    Args:
        mark: the worker's `WeightsSource.mark` where it runs in another process; empty where it is
            not known.
    """

    def __init__(
        self, identity: Identity, *, mark: bytes = b"", cache: DigestCache | None = None
    ) -> None:
        self._identity = identity
        self._started = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.namespace: Namespace | None = None
        """Once it is known."""
        self.reason = MissReason.NAMESPACE_PENDING
        """Why it is not known."""
        weights = identity.weights
        if mark not in (b"", weights.mark):
            self._fail(_CHANGED)
        elif weights.unknown:
            self._fail(weights.unknown)
        elif not weights.files:
            self._know(weights.version)
        else:
            self._begin(cache or DigestCache())

    def _begin(self, cache: DigestCache) -> None:
        """At once where all files are known or small, else by a thread."""
        files = self._identity.weights.files
        known = cache.known(files)
        if all(file.state in known for file in files):
            self._settle(combined(files, known))
            return
        nbytes = sum(file.state[2] for file in files)
        if nbytes <= AT_ONCE_BYTES:
            self._hash(None)
            return
        message = "lookup buffer: hashing %.1f GB of weights; nothing is shared until that is done"
        logger.info(message, nbytes / 1e9)
        self._thread = threading.Thread(
            target=self._hash, args=(cache,), name="lb-weights", daemon=True
        )
        self._thread.start()

    def _hash(self, cache: DigestCache | None) -> None:
        files = self._identity.weights.files
        try:
            self._settle(combined(files, hash_files(files, cache, self._stopped)))
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 -- whatever it is, it must not stay pending
            self._fail(f"the weights cannot be hashed: {error!r}")

    def _settle(self, digest: str) -> None:
        if self._identity.weights.is_current():
            self._know(digest)
        else:
            self._fail(_CHANGED)

    def _know(self, weights: str) -> None:
        namespace = Namespace(self._identity.parts | {"weights": weights})
        seconds = time.monotonic() - self._started
        logger.info("lookup buffer: namespace %s, after %.1f s", namespace.fingerprint, seconds)
        self.namespace = namespace

    def _fail(self, why: str) -> None:
        self.reason = MissReason.NAMESPACE_UNKNOWN
        logger.error(
            "lookup buffer: %s; this engine shares nothing. Setting 'weights_version' names the "
            "weights where nothing else does",
            why,
        )

    def close(self) -> None:
        """Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
