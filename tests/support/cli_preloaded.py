"""What a fork server of commands has imported: all of them, and the client of their store."""

import importlib
import pkgutil

import lookup_buffer.cli
import store.redis_store  # noqa: F401

for _module in pkgutil.iter_modules(lookup_buffer.cli.__path__):
    importlib.import_module(f"lookup_buffer.cli.{_module.name}")
