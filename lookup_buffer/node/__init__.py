"""The node: the process of a host that holds the bytes and serves them.

Its parts, their calls and their threads: see the map in `main.py`. Import arrows point from
the node to protocol, shm and store, never to the client.
"""
