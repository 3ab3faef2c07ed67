"""Calls from the node's other threads back into its loop.

`call_from_thread` is called on every thread of the node that starts with `lb-`.
"""

import asyncio
from collections.abc import Callable


def call_from_thread(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object
) -> None:
    """Schedule `function` on the loop's thread. Does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        pass  # closed: the node is shutting down, and no request waits for the answer
