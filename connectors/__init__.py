"""vLLM's connectors: engines share encoder outputs (`ec`) and KV (`kv`) through lookup buffers.

The only package that knows vLLM. Nothing is imported here: vLLM loads `plugin` in each process.
"""
