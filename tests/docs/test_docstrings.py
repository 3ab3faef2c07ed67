"""Each "see `name`" in a docstring or a comment names something that exists in the product."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("connectors", "examples", "lookup_buffer", "store")
REFERENCE = re.compile(r"\b[Ss]ee(?: the)? (?:`([^`]+)`|([A-Z]\w*(?:\.\w+)+))")

Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    path: Path
    tree: ast.Module
    names: set[str] = field(default_factory=set)
    """Top-level names, imported ones among them."""
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)


def bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds where it stands."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Assign():
            for target in statement.targets:
                yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import() | ast.ImportFrom():
            for alias in statement.names:
                yield (alias.asname or alias.name).partition(".")[0]
        case ast.If() | ast.Try() | ast.With():
            for inner in (*statement.body, *getattr(statement, "orelse", ())):
                yield from bound(inner)


class Product:
    """All modules of the product, read but not imported."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        self.classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
        for path in sorted(path for name in PACKAGES for path in (root / name).rglob("*.py")):
            module = Module(path, ast.parse(path.read_text(encoding="utf-8")))
            for statement in module.tree.body:
                module.names.update(bound(statement))
                if isinstance(statement, ast.ClassDef):
                    module.classes[statement.name] = statement
                    self.classes[statement.name].append(statement)
            parts = path.relative_to(root).with_suffix("").parts
            self.modules[".".join(parts).removesuffix(".__init__")] = module

    def broken(self) -> list[str]:
        """A line for each reference to what there is not."""
        found = []
        for name, module in self.modules.items():
            for line, text, scopes in _texts(module):
                for match in REFERENCE.finditer(text):
                    target = match[1] or match[2]
                    if not self._exists(name, module, scopes, target):
                        where = f"{module.path.relative_to(self.root)}:{line}"
                        found.append(f"{where}: `{target}` is no module, class, attribute or file")
        return found

    def _exists(self, name: str, module: Module, scopes: list[Scope], target: str) -> bool:
        if "/" in target or target.endswith((".md", ".py", ".lua")):
            return any((folder / target).exists() for folder in (self.root, *module.path.parents))
        first, *rest = re.sub(r"\(.*\)$", "", target).split(".")
        for scope in scopes:
            if isinstance(scope, ast.ClassDef) and first in self._attributes(scope):
                return True
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and not rest:
                arguments = scope.args
                every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                if first in {one.arg for one in every}:
                    return True
        if first in self.classes:
            return not rest or any(rest[0] in self._attributes(one) for one in self.classes[first])
        if first in module.names:
            return True
        package = name if module.path.name == "__init__.py" else name.rpartition(".")[0]
        while package:
            if self._is_in_module(f"{package}.{first}", rest):
                return True
            package = package.rpartition(".")[0]
        if not rest and any(first in self._attributes(one) for one in module.classes.values()):
            return True
        if first in PACKAGES and self._is_in_module(first, rest):
            return True
        of = f"{name.partition('.')[0]}."
        ours = {at: one for at, one in self.modules.items() if at.startswith(of)}
        return any(
            self._is_in_module(at, rest) if at.endswith(f".{first}") else first in one.names
            for at, one in ours.items()
            if not rest or at.endswith(f".{first}")
        )

    def _is_in_module(self, name: str, rest: list[str]) -> bool:
        """Whether the names behind that of a module, or of a package, lead to something."""
        while rest and f"{name}.{rest[0]}" in self.modules:
            name, *rest = f"{name}.{rest[0]}", *rest[1:]
        if name not in self.modules:
            return False
        module = self.modules[name]
        if len(rest) == 2 and rest[0] in module.classes:
            return rest[1] in self._attributes(module.classes[rest[0]])
        return not rest or (len(rest) == 1 and rest[0] in module.names)

    def _attributes(self, of: ast.ClassDef) -> set[str]:
        """Methods, fields, and what methods set on `self`; inherited ones as well."""
        found = {name for statement in of.body for name in bound(statement)}
        for node in ast.walk(of):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                    found.add(node.attr)
        for base in of.bases:
            base_name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            for one in self.classes.get(base_name, ()):
                if one is not of:
                    found |= self._attributes(one)
        return found


def _texts(module: Module) -> Iterator[tuple[int, str, list[Scope]]]:
    """Docstrings, those of attributes among them, and comments, with what encloses each."""
    source = module.path.read_text(encoding="utf-8")
    enclosing: dict[int, list[Scope]] = {}

    def visit(node: ast.AST, scopes: list[Scope]) -> Iterator[tuple[int, str, list[Scope]]]:
        if isinstance(node, Scope):
            scopes = [node, *scopes]
            last = getattr(node, "end_lineno", None) or source.count("\n") + 1
            enclosing.update(dict.fromkeys(range(getattr(node, "lineno", 1), last + 1), scopes))
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield child.lineno, " ".join(text.split()), scopes
                case _:
                    yield from visit(child, scopes)

    yield from visit(module.tree, [])
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, enclosing.get(token.start[0], [])


def test_every_reference_in_the_product_resolves() -> None:
    broken = Product(ROOT).broken()
    assert not broken, "docstrings refer to what does not exist:\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("reference", "exists"),
    [
        ("`Known`", True),
        ("`Known.method`", True),
        ("`Known.inherited`", True),
        ("`Known.field`", True),
        ("Known.method", True),
        ("`method`", True),
        ("`known`", True),
        ("`node.known.LIMIT`", True),
        ("`lookup_buffer.node.known.LIMIT`", True),
        ("`docs/known.md`", True),
        ("`Gone`", False),
        ("`Known.gone`", False),
        ("Known.gone", False),
        ("`gone`", False),
        ("`node.known.GONE`", False),
        ("`node.gone.LIMIT`", False),
        ("`lookup_buffer.node.gone`", False),
        ("`docs/gone.md`", False),
    ],
)
def test_a_planted_reference_is_checked(tmp_path: Path, reference: str, exists: bool) -> None:
    files = {
        "docs/known.md": "",
        "lookup_buffer/__init__.py": "",
        "lookup_buffer/node/__init__.py": "",
        "lookup_buffer/node/known.py": "LIMIT = 1\n",
        "lookup_buffer/node/planted.py": (
            "class Base:\n    def inherited(self) -> None: ...\n\n\n"
            f'class Known(Base):\n    """Text; see {reference}."""\n\n    field: int = 0\n\n'
            "    def method(self) -> None: ...\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (Product(tmp_path).broken() == []) is exists
