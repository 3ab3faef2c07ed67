"""The command line for starting the demo's Python modules as processes."""

import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` with this interpreter.

    -P: no folder of the working directory, such as one called `store`, shadows a package.
    """
    safe = ("-P",) if sys.flags.safe_path else ()
    return [sys.executable, *safe, "-m", module, *arguments]
