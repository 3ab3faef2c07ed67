"""Names of chunks of KV cache: a chain hash over everything that the bytes depend on. Pure.

A chunk is a fixed number of tokens. Its name is a hash over the name of the previous chunk, its own
tokens and the media that overlap it. The chain starts with the adapter's digest and the cache salt.
So equal names mean an equal prompt up to the end of the chunk, within one namespace.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

from connectors.identifiers import Adapters, NotShareable, shared_key
from lookup_buffer.key import TensorKey

_TOKEN: Final = "q"  # 64 bits a token, so that two lists of tokens never have the same bytes


def key_of(name: str, rank: int, transfer: str = "") -> TensorKey:
    """The key of one rank's part of a chunk; with a transfer id, the key of its hand-off."""
    return TensorKey(name, request_id=transfer or None, part=str(rank))


class ChunkChain:
    """The names of one request's whole chunks, as far as its tokens are known.

    Args:
        request: vLLM's; its tokens are only appended to.
        chunk_tokens: how many tokens a chunk has.
        adapters: digests of LoRA adapters.

    Raises:
        NotShareable: the request's KV depends on something without a name on other instances.
    """

    def __init__(self, request: Any, chunk_tokens: int, adapters: Adapters) -> None:
        lora = getattr(request, "lora_request", None)
        # Also of what is not shared: vLLM keeps its outputs.
        digest = "" if lora is None else adapters.digest_of(lora)
        features = request.mm_features or ()
        is_embedded = any(feature.modality == "prompt_embeds" for feature in features)
        if is_embedded or getattr(request, "prompt_embeds", None) is not None:
            raise NotShareable("prompt_embeds")
        if getattr(request, "resumable", False):  # its media are not known yet
            raise NotShareable("session")
        self._tokens = chunk_tokens
        self._media = [
            (
                feature.mm_position.offset,
                feature.mm_position.length,
                _name(feature, request, adapters),
            )
            for feature in features
        ]
        if adapters.mixed and getattr(request, "cache_salt", None):
            raise NotShareable("lora")  # its text may be an adapter's name
        if lora is not None:
            encoded = self._media and adapters.encode
            reused = encoded and adapters.is_reused(lora.lora_name)
            if not digest or adapters.mixed or reused:
                raise NotShareable("lora")
        self._first = self._link = _seed(request, digest)
        self.names: list[str] = []

    def grow(self, tokens: Sequence[int], count: int) -> list[str]:
        """The names of the first `count` chunks, or of fewer where `tokens` end earlier."""
        for index in range(len(self.names), min(count, len(tokens) // self._tokens)):
            self._add(index, tokens)
        return self.names[:count]

    def rest(self, tokens: Sequence[int]) -> str:
        """The name of the tokens after the last whole chunk of `tokens`. Call `grow` for all whole
        chunks before."""
        start = len(tokens) // self._tokens * self._tokens
        link = bytes.fromhex(self.names[start // self._tokens - 1]) if start else self._first
        return self._digest(link, tokens, start, len(tokens)).hex()

    def _add(self, index: int, tokens: Sequence[int]) -> None:
        start, end = index * self._tokens, (index + 1) * self._tokens
        self._link = self._digest(self._link, tokens, start, end)
        self.names.append(self._link.hex())

    def _digest(self, before: bytes, tokens: Sequence[int], start: int, end: int) -> bytes:
        link = hashlib.sha256(before)
        link.update(array(_TOKEN, tokens[start:end]).tobytes())
        for offset, length, name in self._media:
            if offset < end and offset + length > start:
                link.update(f"\0{offset}:{length}:{len(name)}:{name}".encode())
        return link.digest()


def _seed(request: Any, digest: str) -> bytes:
    salt = getattr(request, "cache_salt", None) or ""
    return hashlib.sha256(f"{digest}\0{salt}".encode("utf-8", "surrogatepass")).digest()


def _name(feature: Any, request: Any, adapters: Adapters) -> str:
    mm_hash = getattr(feature, "mm_hash", None)
    return shared_key(feature.identifier, request, adapters, mm_hash).text
