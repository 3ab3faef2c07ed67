"""Memory that the processes of a host share: the arena, its allocator, the index tables."""
