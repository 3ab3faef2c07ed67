"""`LookupBufferECConnector`: engines share encoder outputs. vLLM calls `connector`."""
