"""What one vLLM release asks of an encoder-cache connector: its base class, and its calls.

The base class says what may be called, the scheduler's and the workers' sources what really is.
Both are held against our class without running anything.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
