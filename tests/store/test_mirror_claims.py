"""Claims over the mirror's connection: what they leave in memory."""

import gc
from concurrent.futures import Future

from mirrors import Mirroring
from nodes import wait_until
from patience import scaled
from servers import flush
from store import ClaimAnswer, Claiming, ClaimState, EmbeddedServer, Releasing
from store.client import Script
from store.mirror_claims import RedisMirrorClaims

COUNT = 500


def test_claims_and_releases_leave_no_garbage(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    """Also the first ones, for which the server has to be sent the scripts."""
    flush(valkey_server.url)
    with Mirroring(valkey_server.url) as mirroring:
        claims = RedisMirrorClaims(mirroring.mirror, Script("claim"), Script("release"))
        claimings = [
            Claiming(namespace, f"k{n}", "holder", "token", ClaimState.ENCODING, 60.0)
            for n in range(COUNT)
        ]
        releasings = [Releasing(one.namespace, one.key, one.token) for one in claimings]

        def ask() -> None:
            for claiming, releasing in zip(claimings, releasings, strict=True):
                claims.claim(claiming, granted.append)
                claims.release(releasing, released.append)
            claims.claim(claimings[0], last.set_result)

        granted: list[object] = []
        released: list[object] = []
        last: Future[object] = Future()
        gc.collect()
        gc.disable()
        try:
            mirroring.do(ask)
            assert isinstance(last.result(scaled(10.0)), ClaimAnswer)
            # What the server did not have the script for was sent again, perhaps after the last.
            wait_until(lambda: len(granted) == len(released) == COUNT, 10.0)
            assert gc.collect() < COUNT // 5
        finally:
            gc.enable()
        assert all(isinstance(one, ClaimAnswer) and one.granted for one in granted)
        assert released == [True] * COUNT
