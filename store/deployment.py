"""Builds the topology that a store URL names. The only module that knows all of them."""

from dataclasses import replace

from store.cluster import ClusterTopology
from store.dialled import Access, Endpoint
from store.sentinel import SentinelTopology
from store.server import Server
from store.topology import Standalone, Topology
from store.url import StoreUrl


def open_topology(
    address: StoreUrl, call_timeout_seconds: float, connect_timeout_seconds: float
) -> Topology:
    """The topology of `address`. Does not connect yet."""
    access = Access(
        username=address.username,
        password=address.password,
        database=address.database,
        tls=address.tls,
        tls_files=address.tls_files,
        call_timeout_seconds=call_timeout_seconds,
        connect_timeout_seconds=connect_timeout_seconds,
    )
    if address.path:
        return Standalone(Server(Endpoint(path=address.path), access))
    endpoints = [Endpoint(host, port) for host, port in address.hosts]
    if address.topology == "cluster":
        return ClusterTopology(endpoints, access)
    if address.topology == "sentinel":
        sentinel_access = replace(
            access,
            username=address.sentinel_username,
            password=address.sentinel_password,
            database=0,
        )
        return SentinelTopology(endpoints, address.service, access, sentinel_access)
    return Standalone(Server(endpoints[0], access))
