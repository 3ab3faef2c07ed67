"""What is asked of the connector under one vLLM release; see host_check, which runs it."""

import inspect
import sys
from pathlib import Path
from typing import Any

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

import host_calls
from connectors.ec.connector import LookupBufferECConnector
from connectors.plugin import CONNECTOR_MODULE, CONNECTOR_NAME
from host_drive import drive

# What each release must be seen to call, so that a search that finds nothing cannot pass.
ALWAYS_CALLED = {
    "bind_connector_metadata", "build_connector_meta", "clear_connector_metadata", "get_finished",
    "save_caches", "start_load_caches", "update_state_after_alloc",
}  # fmt: skip


def check(sources: Path) -> list[str]:
    """Raises AssertionError; returns what was done."""
    roles = roles_that_parse()
    check_loading()
    count = check_interface(sources)
    driven = drive(roles)
    strangers = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "vllm"
        and not str(getattr(module, "__file__", None) or sources).startswith(str(sources))
    ]
    assert not strangers, f"another vLLM was loaded: {strangers}"
    return ["loads", f"{count} uses fit", f"roles {'/'.join(roles)}", *driven]


def roles_that_parse() -> list[str]:
    parsed = []
    for role in ("ec_producer", "ec_consumer", "ec_both"):
        try:
            ECTransferConfig(ec_connector=CONNECTOR_NAME, ec_role=role)
        except ValueError:
            continue
        parsed.append(role.removeprefix("ec_"))
    assert parsed[:2] == ["producer", "consumer"]
    return parsed


def check_loading() -> None:
    config = ECTransferConfig(
        ec_connector=CONNECTOR_NAME,
        ec_role="ec_consumer",
        ec_connector_module_path=CONNECTOR_MODULE,
    )
    assert ECConnectorFactory.get_connector_class(config) is LookupBufferECConnector
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config.ec_connector_module_path = None
    assert ECConnectorFactory.get_connector_class(config) is LookupBufferECConnector


def check_interface(sources: Path) -> int:
    """Nothing is left abstract, and every use fits. Returns how many were found."""
    ours: Any = LookupBufferECConnector
    assert not inspect.isabstract(ours), ours.__abstractmethods__
    assert issubclass(ours, ECConnectorBase)
    found = host_calls.uses(sources, ECConnectorBase)
    called = {use.name for use in found if use.is_call}
    assert called >= ALWAYS_CALLED, f"not found: {ALWAYS_CALLED - called}"
    assert called & {"has_caches", "has_cache_item"}
    wrong = [why for use in found if (why := use.refused_by(ours))]
    wrong += host_calls.refused_parameters(ECConnectorBase, ours)
    assert not wrong, "\n".join(wrong)
    return len(found)
