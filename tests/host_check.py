"""Holds the connector against one vLLM release, in a process of its own.

    PYTHONPATH=build/hosts/VERSION:tests python tests/host_check.py VERSION build/hosts/VERSION

vLLM comes from that folder alone: Python sources without its compiled modules, beside the torch and
transformers of this environment. Prints one line and exits 0, or what is wrong and exits 1.
"""

import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

import host_stubs


def main() -> int:
    version, sources = sys.argv[1], Path(sys.argv[2]).resolve()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_PLUGINS"] = "lookup_buffer"
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    host_stubs.install()
    try:
        from host_checks import check

        done = check(sources)
    except Exception:
        print(f"{version:8} FAILED")
        traceback.print_exc()
        return 1
    stubs = ", ".join(host_stubs.used()) or "none"
    print(f"{version:8} ok: {'; '.join(done)}; stubs: {stubs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
