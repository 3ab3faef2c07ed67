"""A node as a process of the tests: `python -m node_program SETTINGS PRELUDE`.

SETTINGS is the JSON that a node reads from its standard input. PRELUDE is Python that runs first.
"""

import faulthandler
import io
import sys

PRELOADED = "node_preloaded"


def run() -> None:
    settings, prelude = sys.argv[1:]
    faulthandler.enable()
    exec(prelude, {})
    sys.stdin = io.StringIO(settings)
    from lookup_buffer.node.main import main

    main()


if __name__ == "__main__":
    run()
