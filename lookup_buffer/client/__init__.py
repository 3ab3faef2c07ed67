"""The client of a node: what programs and connectors call. Never imports the node."""
