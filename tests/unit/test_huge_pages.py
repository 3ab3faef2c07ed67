"""The advice on memory that the kernel is given."""

from pathlib import Path

import pytest

from lookup_buffer.codec import empty_tensor
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.shm.memory import HUGE_BYTES, PAGE_BYTES

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def flags_at(address: int) -> list[str]:
    """Of the mapping with this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, stop = (int(part, 16) for part in words[0].split("-"))
            inside = start <= address < stop
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    raise LookupError(hex(address))


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no transparent huge pages")
def test_large_new_tensors_prefer_huge_pages() -> None:
    tensor = empty_tensor(TensorHeader.for_tensor("bfloat16", (HUGE_BYTES, 8)))
    for address in (tensor.data_ptr() + PAGE_BYTES, tensor.data_ptr() + tensor.nbytes // 2):
        assert "hg" in flags_at(address)


def test_empty_and_small_tensors_are_made_as_before() -> None:
    for shape in [(), (0,), (3, 0), (5,), (HUGE_BYTES + 1,)]:
        tensor = empty_tensor(TensorHeader.for_tensor("uint8", shape))
        assert tensor.shape == shape
        tensor.fill_(1)
