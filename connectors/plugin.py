"""vLLM's entry point `vllm.general_plugins`: registers the connectors' names, and patches vLLM to
hash the images of one model alike with the hub online and offline, and to refuse requests without
media that would end an engine.

Runs on the main thread of every vLLM process (API server, engine core, workers), in some more than
once. It also runs in engines that do not use this package, wherever it is installed. So it imports
little besides vLLM's registry, and never raises: vLLM does not catch errors of plugins, so an error
would prevent such engines from starting.
"""

import logging
from typing import Any

CONNECTOR_NAME = "LookupBufferECConnector"
CONNECTOR_MODULE = "connectors.ec.connector"
KV_CONNECTOR_NAME = "LookupBufferKVConnector"
KV_CONNECTOR_MODULE = "connectors.kv.connector"

logger = logging.getLogger(__name__)


def register() -> None:
    """Make `"ec_connector": "LookupBufferECConnector"` and `"kv_connector":
    "LookupBufferKVConnector"` work without a module path. Idempotent."""
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    except ImportError:
        pass  # vLLM before 0.11.1, or no vLLM: there is no registry
    else:
        _put(ECConnectorFactory, CONNECTOR_NAME, CONNECTOR_MODULE)
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        pass  # likewise
    else:
        _put(KVConnectorFactory, KV_CONNECTOR_NAME, KV_CONNECTOR_MODULE)

    _hash_by_repository()
    _require_media()


def _hash_by_repository() -> None:
    from connectors import hub

    try:
        hub.hash_by_repository()
    except Exception as error:  # noqa: BLE001 -- an unknown host must not break vLLM's start
        logger.warning(
            "vLLM was not patched to hash images by the repository's name; engines with the hub "
            "offline do not share with engines online: %r",
            error,
        )


def _require_media() -> None:
    from connectors import missing_media

    try:
        missing_media.require_media(KV_CONNECTOR_NAME)
    except Exception as error:  # noqa: BLE001 -- an unknown host must not break vLLM's start
        logger.warning(
            "vLLM was not patched to refuse requests without media, one of which can end an engine "
            "with %s that is no EC consumer: %r",
            KV_CONNECTOR_NAME,
            error,
        )


def _put(registry: Any, name: str, module: str) -> None:
    try:
        registry.register_connector(name, module, name)
    except ValueError:
        pass  # already registered: vLLM may load plugins more than once in a process
    except Exception as error:  # noqa: BLE001 -- an unknown registry must not break vLLM's start
        logger.warning("%s is not registered with this vLLM: %r", name, error)
