"""The paths of the HTTP listener: the dashboard, `/metrics` for Prometheus, `/healthz` for probes.

`node.py` builds them; they run on `lb-http`.
"""

import functools
from typing import TYPE_CHECKING

from lookup_buffer.config import BufferConfig
from lookup_buffer.node.http_dashboard import dashboard_pages
from lookup_buffer.node.http_page import Maker, Page, Request
from lookup_buffer.node.observer import Observer, observer_command
from lookup_buffer.node.vitals import Vitals

if TYPE_CHECKING:  # imports prometheus-client: only for nodes that are scraped
    from lookup_buffer.node.exposition import Exposition


def pages_of(vitals: Vitals, config: BufferConfig) -> dict[str, Maker]:
    @functools.cache
    def exposition() -> "Exposition":
        from lookup_buffer.node.exposition import Exposition

        return Exposition(vitals)

    def metrics(request: Request) -> Page:
        return exposition().page(request)

    def health(_: Request) -> Page:
        unhealthy_reason = vitals.unhealthy_reason()
        return Page.line(503, unhealthy_reason) if unhealthy_reason else Page.line(200, "ok")

    observer = Observer(observer_command(vitals.identity.node, config))
    return {
        **dashboard_pages(observer, needs_token=config.http_token is not None),
        "/metrics": metrics,
        "/healthz": health,
    }
