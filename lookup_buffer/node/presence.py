"""`has_caches`: which of many keys a live node holds, as far as that is known within a time budget.

Called by `desk` on the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lookup_buffer.node.locator import Located, Locator
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.protocol.messages import Contains


@dataclass(slots=True)
class Presence:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    locator: Locator

    def tell(self, request: Contains, reply: Callable[[dict[str, Any]], None]) -> None:
        """Reply as `Contains` says, within its budget."""
        addresses = [(request.namespace, key) for key in request.keys]
        present = self.shelf.holds_each(addresses)
        unknown = self._still_unknown(request, present)
        if not unknown:
            reply({"present": present})
            return

        def answer() -> None:
            if not answered:
                answered.append(True)
                bound.cancel()
                reply({"present": present})

        def located(found: list[Located]) -> None:
            for index, entry in zip(unknown, found, strict=True):
                present[index] = bool(entry.sources)
            answer()

        answered: list[bool] = []
        bound = self.loop.call_later(request.budget_seconds, answer)
        self.locator.ask([addresses[index] for index in unknown], located)

    def _still_unknown(self, request: Contains, present: list[bool]) -> list[int]:
        """Fill in what is known without a call of the store; returns the positions of the
        others."""
        away = [index for index, here in enumerate(present) if not here]
        known = self.locator.known(request.namespace, [request.keys[index] for index in away])
        for index, held in zip(away, known, strict=True):
            present[index] = bool(held)
        return [index for index, held in zip(away, known, strict=True) if held is None]
