"""Fixtures for tests of commands: the shared server, emptied, and a store on it."""

from collections.abc import Iterator

import pytest

from servers import flush, patient
from store import EmbeddedServer, MetadataStore


@pytest.fixture
def url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """Of a server in which nothing stands."""
    flush(valkey_server.url)
    yield valkey_server.url
    flush(valkey_server.url)


@pytest.fixture
def store(url: str) -> Iterator[MetadataStore]:
    with patient(url) as store:
        yield store
