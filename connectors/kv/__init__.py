"""`LookupBufferKVConnector`: engines share KV. vLLM loads `connector`; for the first KV interface
see `kv_v0`.
"""
