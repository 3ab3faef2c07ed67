"""Tensors that stay on a device: the pool of a process, and the lanes to other processes' pools."""
