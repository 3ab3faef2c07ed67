"""Calling back into the node's loop from its threads."""

import asyncio
from collections.abc import Callable


def call_from_thread(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object
) -> None:
    """Run `function` soon on the loop's thread; nothing once the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        pass  # closed: the node is ending and nobody waits for the answer any more
