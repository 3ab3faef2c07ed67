"""`lookup-buffer ARGUMENTS` as a process of the tests: `python -m cli_program ARGUMENTS`."""

import sys

from lookup_buffer.cli import main

if __name__ == "__main__":
    sys.argv[0] = "lookup-buffer"
    main()
