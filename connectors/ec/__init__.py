"""`LookupBufferECConnector`: engines share encoder outputs. vLLM imports and calls `connector`."""
