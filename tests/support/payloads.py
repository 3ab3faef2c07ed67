"""Payloads that tests and their processes know from a number alone."""

import torch


def block(nbytes: int, seed: int = 0) -> torch.Tensor:
    """A uint8 tensor of bytes that look random. One number makes eight of them: with a number each,
    a twentieth of the suite's processor time would go into this."""
    words = torch.empty(-(-nbytes // 8), dtype=torch.int64)
    words.random_(generator=torch.Generator().manual_seed(seed))
    return words.view(torch.uint8)[:nbytes]
