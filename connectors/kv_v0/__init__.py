"""The first KV interface of vLLM: send and receive, with bypass of the prefill."""
