"""`LookupBufferKVConnector`: engines share KV. vLLM calls `connector`, older hosts `first`."""
