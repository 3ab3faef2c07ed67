"""How the demo starts Python programs of ours."""

import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """Runs `module` as this process was run: with -P, no folder of the working directory (which
    may well be called `store`) gets in the way of a package."""
    safe = ("-P",) if sys.flags.safe_path else ()
    return [sys.executable, *safe, "-m", module, *arguments]
