"""vLLM's entry point `vllm.general_plugins`: makes the connector's name known, nothing else.

Runs on the main thread of every vLLM process (API server, engine core, workers), in some of them
more than once, also for people who merely have this package installed. So it imports nothing but
vLLM's registry, and never raises: vLLM calls plugins unguarded, and an error here would keep
engines from starting that have nothing to do with us.
"""

import logging

CONNECTOR_NAME = "LookupBufferECConnector"
CONNECTOR_MODULE = "connectors.ec_connector"

logger = logging.getLogger(__name__)


def register() -> None:
    """Make `"ec_connector": "LookupBufferECConnector"` work without a module path. Idempotent."""
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    except ImportError:
        return  # vLLM before 0.11.1, or none: there is no registry to put a name into
    try:
        ECConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError:
        pass  # already there: vLLM may load plugins more than once in a process
    except Exception as error:  # noqa: BLE001 -- an unknown registry must not break vLLM's start
        logger.warning("%s is not registered with this vLLM: %r", CONNECTOR_NAME, error)
