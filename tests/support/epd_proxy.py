"""A proxy before encoder and consumer instances, which does what the one of vLLM's examples does.

For each image of a chat request it first sends a request with that image alone to an encoder
instance, all of them at once, and then the whole request to a consumer. If an encoder instance
fails, so does the request (502). After vLLM's
examples/online_serving/disaggregated_encoder/disagg_epd_proxy.py; the code is our own.
"""

import http.client
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from openai_servers import ASK_SECONDS, COMPLETIONS, Part, Reply, chat_of, post

MEDIA = {"image_url", "audio_url", "input_audio", "video_url"}


class EncodeFailed(Exception):
    """An encoder instance did not answer with status 200."""


class Proxy:
    """Takes the instances by turns. The proxy itself listens at `port`."""

    def __init__(self, encoders: Sequence[int], consumers: Sequence[int]) -> None:
        """Ports of the instances."""
        self._encoders = itertools.cycle(encoders)
        self._consumers = itertools.cycle(consumers)
        self._turns = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = proxy.forward(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]

    def forward(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer."""
        try:
            self._encode([part for part in _parts(body) if part["type"] in MEDIA], body["model"])
            with self._turns:
                consumer = next(self._consumers)
            reply = post(consumer, COMPLETIONS, body)
        except (OSError, http.client.HTTPException, EncodeFailed) as error:
            return 502, {"error": {"message": str(error)}}
        return reply.status, reply.body

    def _encode(self, items: Sequence[Part], model: str) -> None:
        if not items:
            return
        with self._turns:
            turns = [next(self._encoders) for _ in items]

        def encode(port: int, item: Part) -> Reply:
            return post(port, COMPLETIONS, chat_of([item], tokens=1) | {"model": model})

        with ThreadPoolExecutor(max_workers=len(items)) as requests:
            for reply in requests.map(encode, turns, items):
                if reply.status != 200:
                    raise EncodeFailed(f"{reply.status} {reply.body}")

    @contextmanager
    def listening(self) -> Iterator["Proxy"]:
        """The proxy, in a thread of this process."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(ASK_SECONDS)


def _parts(body: dict[str, Any]) -> list[Part]:
    contents = [message["content"] for message in body["messages"]]
    return [part for content in contents if isinstance(content, list) for part in content]
