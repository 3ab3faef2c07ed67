"""What the HTTP listener serves: `/metrics` for Prometheus, `/healthz` for probes."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from lookup_buffer.node.http_page import Page, Request
from lookup_buffer.node.vitals import Vitals

if TYPE_CHECKING:  # it imports prometheus-client, which only who is scraped shall pay for
    from lookup_buffer.node.exposition import Exposition


def pages_of(vitals: Vitals) -> dict[str, Callable[[Request], Page]]:
    @functools.cache
    def exposition() -> "Exposition":
        from lookup_buffer.node.exposition import Exposition

        return Exposition(vitals)

    def metrics(request: Request) -> Page:
        return exposition().page(request)

    def health(_: Request) -> Page:
        ailment = vitals.ailment()
        return Page.line(503, ailment) if ailment else Page.line(200, "ok")

    return {"/metrics": metrics, "/healthz": health}
