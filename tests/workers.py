"""Which of the processes that run tests side by side this one is; see scripts/run-tests."""

import os


def worker_number() -> int:
    """From 0; 0 where no other runs beside it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
