"""The attacker is a page of the web in the browser of somebody on a node's host.

It can have requests sent to the node's HTTP listener, under names of its own that resolve to
127.0.0.1, and it must learn nothing and cause no work. Requests are raw: they say what a browser
says of itself, and also what only an old one would leave out.
"""

import socket

import pytest

from nodes import NodeProcess, StartNode, wait_until
from observing import ANSWER_SECONDS, address_of, get
from servers import free_port

DATA = ["/metrics", "/dashboard/stream", "/dashboard/why?key=k"]
PAGE = "/"


@pytest.fixture(scope="module")
def node(module_nodes: StartNode) -> NodeProcess:
    """On loopback, and without a token for HTTP."""
    node = module_nodes(http_listen=f"http://127.0.0.1:{free_port()}")
    wait_until(lambda: get(node, "/healthz")[0] == 200, 10.0, "the node joins")
    return node


def head_of(node: NodeProcess, path: str, *headers: str, method: str = "GET") -> str:
    """The head of the answer, in lower case."""
    lines = [f"{method} {path} HTTP/1.1", *headers]
    with socket.create_connection(address_of(node), timeout=ANSWER_SECONDS) as bare:
        bare.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1"))
        said = b""
        while b"\r\n\r\n" not in said and (part := bare.recv(65536)):
            said += part
    return said.partition(b"\r\n\r\n")[0].decode("latin-1").lower()


def status_of(head: str) -> int:
    return int(head.split(" ", 2)[1])


@pytest.mark.parametrize(
    "name",
    [
        "rebound.example",
        "[::1]evil.com",
        "[::1].evil.com:7731",
        "[::1]:7731.evil.com",
        "[::1]@evil.com",
        "[::1",
        "::1",
        "[127.0.0.1]",
        "127.0.0.1.evil.com",
        "127.0.0.1:7731.evil.com",
        "127.0.0.1:evil.com",
        "localhost:7731:evil.com",
        "localhost.evil.com",
        "localhost@evil.com",
        "evil.com#localhost",
        "0.0.0.0:7731",
    ],
)
@pytest.mark.parametrize("path", [*DATA, PAGE])
def test_a_name_that_is_not_loopback_is_refused(node: NodeProcess, path: str, name: str) -> None:
    """DNS rebinding: to the browser the answer would be the attacker's own, which it may read."""
    head = head_of(node, path, f"Host: {name}")
    assert status_of(head) == 421, head


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.1:7731", "[::1]", "[::1]:80"])
def test_a_name_of_loopback_is_answered(node: NodeProcess, name: str) -> None:
    """The control of the test before."""
    assert status_of(head_of(node, "/metrics", f"Host: {name}")) == 200


def test_a_second_name_is_refused(node: NodeProcess) -> None:
    head = head_of(node, "/metrics", "Host: localhost", "Host: evil.com")
    assert status_of(head) == 400


@pytest.mark.parametrize(
    "said",
    [
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",  # a page of another port of this host
        "Origin: https://evil.com",  # a browser without Sec-Fetch-Site
        "Origin: http://localhost:8888",
        "Origin: null",
    ],
)
@pytest.mark.parametrize("path", DATA)
def test_a_page_of_another_site_causes_no_work(node: NodeProcess, path: str, said: str) -> None:
    assert status_of(head_of(node, path, "Host: localhost", said)) == 403


def test_the_page_itself_is_answered(node: NodeProcess) -> None:
    """The control of the test before: no browser names the origin of a page that reads its own."""
    said = ("Host: localhost", "Sec-Fetch-Site: same-origin")
    assert status_of(head_of(node, "/metrics", *said)) == 200


def test_no_answer_may_be_read_or_shown_by_another_site(node: NodeProcess) -> None:
    for path in (*DATA[:2], PAGE, "/healthz", "/nothing"):
        head = head_of(node, path, "Host: localhost")
        assert "access-control-" not in head
        assert "cross-origin-resource-policy: same-origin" in head
        assert "frame-ancestors 'none'" in head
        assert "x-content-type-options: nosniff" in head


def test_a_preflight_is_refused(node: NodeProcess) -> None:
    """So no other site may send the header `Authorization`."""
    asked = ("Origin: https://evil.com", "Access-Control-Request-Method: GET")
    wanted = "Access-Control-Request-Headers: authorization"
    head = head_of(node, "/metrics", "Host: localhost", *asked, wanted, method="OPTIONS")
    assert status_of(head) == 405
    assert "access-control-" not in head


def test_a_browser_sends_nothing_by_itself_that_gives_access(start_node: StartNode) -> None:
    """A browser adds cookies and the passwords of a log-in dialogue to requests of any page."""
    token = "for-the-metrics-and-no-page"
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}", http_token=token)
    asked = "Host: localhost"
    head = head_of(node, "/metrics", asked, f"Cookie: http_token={token}")
    assert status_of(head) == 401
    assert "basic" not in head
    assert "set-cookie" not in head
    assert status_of(head_of(node, f"/metrics?http_token={token}", asked)) == 401
    given = f"Authorization: Bearer {token}"
    head = head_of(node, "/metrics", asked, given)
    assert status_of(head) == 200
    assert "set-cookie" not in head
