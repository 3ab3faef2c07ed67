"""Sorted integers in chunks, against a plain list."""

import random
from bisect import bisect_left

import pytest

from lookup_buffer.shm import sorted_ints
from lookup_buffer.shm.sorted_ints import SortedInts


@pytest.mark.parametrize("seed", range(20))
def test_they_are_as_one_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_ints, "CHUNK", 8)
    chance, numbers, plain = random.Random(seed), SortedInts(), list[int]()
    for _ in range(600):
        grows = chance.random() < (0.8 if len(plain) < chance.randint(0, 120) else 0.2)
        number = chance.randrange(200)
        if grows and number not in plain:
            numbers.add(number)
            plain.insert(bisect_left(plain, number), number)
        elif plain and not grows:
            number = plain.pop(chance.choice([0, -1, chance.randrange(len(plain))]))
            numbers.remove(number)
        same(numbers, plain, chance.randrange(201))


def same(numbers: SortedInts, plain: list[int], number: int) -> None:
    rank = bisect_left(plain, number)
    assert len(numbers) == len(plain)
    assert numbers.highest == (plain[-1] if plain else None)
    assert numbers.rank(number) == rank
    assert numbers.at_least(number) == (plain[rank] if rank < len(plain) else None)
    assert numbers.from_rank(rank, 9) == plain[rank : rank + 9]
    if number in plain:
        below, above = plain[rank - 1] if rank else None, [*plain, None][rank + 1]
        assert numbers.around(number) == (below, above)
    assert all(len(chunk) <= 8 for chunk in numbers._chunks)
    assert all(numbers._chunks) or not plain
