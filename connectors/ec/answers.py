"""The answers that vLLM got about items in the current scheduling pass.

vLLM asks for an item several times in a pass and relies on one answer, so an answer holds until the
pass ends. `EcScheduler`, `EcGate` and `FetchingSource` share one `PassCache` on vLLM's scheduler
thread.
"""

from connectors.ec.meanings import ItemVariants, Variant


class PassCache(dict[tuple[str, tuple[Variant, ...]], bool]):
    """Maps an identifier and its variants at the time of the question to the answer."""

    def __init__(self, variants: ItemVariants) -> None:
        super().__init__()
        self._variants = variants

    def set_available(self, identifier: str) -> None:
        """From now on the answer is yes, whatever it was before."""
        self[identifier, self._variants.of(identifier)] = True

    def drop_negative(self, identifier: str) -> None:
        """Drop a no: the item arrived after an earlier request of this pass missed it. A yes
        stays."""
        wanted = identifier, self._variants.of(identifier)
        if self.get(wanted) is False:
            del self[wanted]
