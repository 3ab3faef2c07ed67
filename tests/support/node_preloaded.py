"""What a fork server of nodes has imported: a node, and the client of its store, which it loads
when it opens it."""

import importlib

for _module in ("lookup_buffer.node.main", "store.redis_store"):
    importlib.import_module(_module)
