"""Tensors that stay on a device: a process's device pool, and the lanes to the pools of other
processes."""
