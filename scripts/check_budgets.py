"""Size and naming budgets that ruff has no rule for: what keeps a file readable in one sitting.

Prints one line per breach, in the form path:line, and exits 1 if there was any.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "store",
    "lookup_buffer",
    "connectors",
    "tests",
    "benchmarks",
    "scripts",
    "examples",
)
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
# Names under which anything would fit, so everything ends there.
NAMES_BANNED = frozenset({"utils", "util", "helpers", "helper", "manager", "common", "misc"})


def breaches(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Line number and complaint for every breach in one file."""
    if path.stem in NAMES_BANNED:
        yield 1, f"a file named {path.name!r} says nothing: name the noun it owns"
    lines = len(text.splitlines())
    if lines > FILE_LINES_MAX:
        yield 1, f"{lines} lines, the budget is {FILE_LINES_MAX}: split it by noun"
    for node in ast.walk(ast.parse(text, str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES_MAX:
            yield node.lineno, f"{node.name} has {length} lines, the budget is {FUNCTION_LINES_MAX}"


def main() -> int:
    count = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, complaint in breaches(path, path.read_text(encoding="utf-8")):
                print(f"{path.relative_to(ROOT)}:{line}: {complaint}")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
