"""The node: the process of a host that holds the payload and serves it."""
