"""`LookupBufferKVConnector`: engines share KV. vLLM loads `connector`. `kv_v0` implements the first
KV interface of vLLM.
"""
