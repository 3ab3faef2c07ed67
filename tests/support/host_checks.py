"""What is asked of the connector under one vLLM release; see host_check, which runs it.

A release's base class says what may be called, the scheduler's and the workers' sources what really
is. Both are held against our class without running anything.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

from connectors.ec.connector import LookupBufferECConnector
from connectors.plugin import CONNECTOR_MODULE, CONNECTOR_NAME
from host_engine import drive

_MAKERS = ("get_ec_transfer", "create_connector")
_NAME = "ec_connector"


@dataclass(frozen=True, slots=True)
class Use:
    """One place where the host calls, or reads, something of its connector."""

    where: str
    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    is_call: bool = False

    def refused_by(self, connector: type) -> str | None:
        """Why this use would fail on `connector`, or None."""
        member = getattr(connector, self.name, None)
        if member is None:
            return f"{self.where}: {self.name} does not exist"
        if not self.is_call:
            return None
        arguments = [None] * self.positional
        if not isinstance(inspect.getattr_static(connector, self.name), classmethod):
            arguments.insert(0, None)
        try:
            inspect.signature(member).bind(*arguments, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.where}: {self.name}: {error}"
        return None


def uses(sources: Path, base: type) -> list[Use]:
    """Every use of a connector outside of the connectors' own folder."""
    found: list[Use] = []
    for folder in ("v1", "distributed", "engine", "model_executor"):
        for path in sorted((sources / "vllm" / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "ec_connector" in path.parent.parts or not any(m in text for m in (*_MAKERS, _NAME)):
                continue
            where = str(path.relative_to(sources))
            found += _uses_in(ast.parse(text), where)
    # The V2 runner calls its own wrapper by the same name.
    wrapper = sources / "vllm/v1/worker/gpu/ec_connector.py"
    own = _methods_in(wrapper) if wrapper.exists() else set()
    return [use for use in found if hasattr(base, use.name) or use.name not in own]


def _uses_in(tree: ast.AST, where: str) -> Iterator[Use]:
    holders = _holders(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not _is_connector(node.value, holders):
            continue
        place = f"{where}:{node.lineno}"
        call = calls.get(id(node))
        if call is None:
            yield Use(place, node.attr)
        else:
            positional = sum(not isinstance(a, ast.Starred) for a in call.args)
            keywords = tuple(k.arg for k in call.keywords if k.arg is not None)
            yield Use(place, node.attr, positional, keywords, is_call=True)


def _holders(tree: ast.AST) -> set[str]:
    """Local names that are given a connector."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_made(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    } | {_NAME}


def _is_made(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (
        node.func.id == "get_ec_transfer"
    )  # fmt: skip


def _is_connector(node: ast.AST, holders: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in holders
    if isinstance(node, ast.Attribute):
        return node.attr == _NAME and isinstance(node.value, ast.Name) and node.value.id == "self"
    return _is_made(node)


def _methods_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def refused_parameters(base: Any, connector: Any) -> list[str]:
    """Methods of the base class whose parameters ours would not take, in either way."""
    refused = []
    for name, declared in vars(base).items():
        ours = inspect.getattr_static(connector, name, None)
        if name.startswith("_") or not inspect.isfunction(declared) or ours is declared:
            continue
        kinds = inspect.Parameter
        parameters = list(inspect.signature(declared).parameters.values())[1:]
        named = [p.name for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD]
        signature = inspect.signature(getattr(connector, name))
        any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values())
        try:
            signature.bind(None, *named)
            signature.bind(None, **dict.fromkeys(named))
        except TypeError as error:
            refused.append(f"{name}: {error}")
        if not any_keyword and any(p.kind is kinds.VAR_KEYWORD for p in parameters):
            refused.append(f"{name}: the host may pass more by keyword")
    return refused


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
    found = uses(sources, ECConnectorBase)
    called = {use.name for use in found if use.is_call}
    assert called >= ALWAYS_CALLED, f"not found: {ALWAYS_CALLED - called}"
    assert called & {"has_caches", "has_cache_item"}
    wrong = [why for use in found if (why := use.refused_by(ours))]
    wrong += refused_parameters(ECConnectorBase, ours)
    assert not wrong, "\n".join(wrong)
    return len(found)
