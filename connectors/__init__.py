"""vLLM's connectors: engines share encoder outputs (`ec`) and KV (`kv`) through lookup buffers.

The only package that imports vLLM. This file imports nothing: vLLM loads `plugin` in each process.
"""
