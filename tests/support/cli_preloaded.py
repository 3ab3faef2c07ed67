"""What a fork server of commands has imported: all of them, and the client of their store.

Without `bench`, which loads torch: its pages would double the time of each fork.
"""

import importlib
import pkgutil

import lookup_buffer.cli
import store.redis_store  # noqa: F401

for _module in pkgutil.iter_modules(lookup_buffer.cli.__path__):
    if _module.name != "speeds":
        importlib.import_module(f"lookup_buffer.cli.{_module.name}")
