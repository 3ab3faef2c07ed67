"""What vLLM was told of items in this pass: an answer holds until the pass ends.

Owned by the scheduler's thread.
"""

from connectors.ec.meanings import Meaning, Meanings


class Answers(dict[tuple[str, tuple[Meaning, ...]], bool]):
    """By an item's identifier, and by what is meant by it when vLLM asks."""

    def __init__(self, meanings: Meanings) -> None:
        super().__init__()
        self._meanings = meanings

    def promised(self, identifier: str) -> None:
        """The item can be had, whatever vLLM was told before."""
        self[identifier, self._meanings.of(identifier)] = True

    def retract_no(self, identifier: str) -> None:
        """The item has come since an earlier request of this pass was told no. A yes stands."""
        asked = identifier, self._meanings.of(identifier)
        if self.get(asked) is False:
            del self[asked]
