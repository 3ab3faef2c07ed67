"""`nccl://HOST:PORT[?device=cuda:N]`: control as in `tcp`, large payload by NCCL, between GPUs.

Each end uses one GPU. If its address names a GPU, it receives into that GPU's memory. If not, it
uses torch's current GPU, and receives into host memory, as the contract says. What was run of it:
docs/pipes.md.

`Nccl` binds libnccl by ctypes: the nine functions that a pair of ranks needs. nccl4py is not used:
it does not import without cuda-bindings, and its extras fix a major version of CUDA and bring a
second NCCL beside torch's, which is the one to use. Calls by ctypes run without the interpreter
lock.

`PairLink` calls the communicator on the remote end's threads.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import torch

from lookup_buffer.codec import Value, check_receivable, empty_tensor, writable_bytes
from lookup_buffer.errors import (
    ConfigError,
    PipeBroken,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.pipes.connect import Upgrade, open_tcp_end
from lookup_buffer.pipes.copies import Copies
from lookup_buffer.pipes.inbox import Offer
from lookup_buffer.pipes.outbox import INLINE_BYTES
from lookup_buffer.pipes.pair import ABORT_SECONDS, Communicator, Exchange, PairLink, agree
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.pipes.stream import HostBytes, Memory
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.shm.memory import bytes_at, pointer_to

UNIQUE_ID_BYTES: Final = 128
UINT8: Final = 1
IN_PROGRESS: Final = 7
POLL_SECONDS: Final = 20e-6


_cuda: Any = torch.cuda  # torch has no types for its streams and events


class NcclCommunicator:
    """See `Communicator`. It sends from and receives into GPU memory.

    It consists of two NCCL communicators, one for each direction. NCCL has no tags: sends and
    receives of one pair match in the order in which they are issued. Opposite sends that are not in
    one group wait for each other. With one communicator for each direction, each has one order (see
    `pair`), and one thread that uses it, as NCCL requires. A kernel of one never waits for a kernel
    of the other. On a GPU without room for both kernels, the deadline bounds the wait.
    """

    def __init__(
        self, nccl: "Nccl", exchange: Exchange, rank: int, device: torch.device, deadline: float
    ) -> None:
        self._nccl = nccl
        self._rank = rank
        self._device = device
        self._stopped = False
        self._handles: list[Any] = []
        self._busy = (threading.Lock(), threading.Lock())
        self._kept: dict[int, memoryview] = {}
        """The memory of the last transfers: the kernel of an abandoned transfer may still access
        it."""
        names = ("from rank 0", "from rank 1")
        ours = {name: nccl.unique_id() for name in names} if rank == 0 else {}
        for name, unique_id in ours.items():
            exchange.put(name, unique_id)
        with torch.cuda.device(device):
            self._streams = [_cuda.Stream() for _ in names]
            try:
                for name in names:
                    unique_id = ours.get(name) or exchange.get(name, deadline)
                    if len(unique_id) != UNIQUE_ID_BYTES:
                        raise ProtocolError("not an NCCL id")
                    handle = nccl.init(rank, unique_id)
                    self._handles.append(handle)
                    while nccl.in_progress(handle):
                        self._pause(deadline)
            except BaseException:
                self.abort()
                raise

    def send(self, memory: memoryview, timeout: float) -> None:
        self._move(self._nccl.send, self._rank, memory, timeout)

    def recv(self, memory: memoryview, timeout: float) -> None:
        self._move(self._nccl.recv, 1 - self._rank, memory, timeout)

    def _move(
        self, call: Callable[..., None], direction: int, memory: memoryview, timeout: float
    ) -> None:
        deadline = time.monotonic() + timeout
        try:
            with self._busy[direction], torch.cuda.device(self._device):
                if self._stopped:
                    raise PipeBroken("this end of the pipe was aborted")
                handle, stream = self._handles[direction], self._streams[direction]
                self._kept[direction] = memory
                call(handle, pointer_to(memory), memory.nbytes, 1 - self._rank, stream.cuda_stream)
                while self._nccl.in_progress(handle):
                    self._pause(deadline)
                moved = _cuda.Event()
                moved.record(stream)
                while not moved.query():
                    self._nccl.in_progress(handle)  # raises if it failed
                    self._pause(deadline)
        except RuntimeError as error:  # torch reports a device's failure by it
            raise PipeBroken("the GPU failed in the middle of a transfer") from error

    def _pause(self, deadline: float) -> None:
        if self._stopped:
            raise PipeBroken("this end of the pipe was aborted")
        if time.monotonic() >= deadline:
            raise PipeTimeout("the other end did not move its bytes in time")
        time.sleep(POLL_SECONDS)

    def abort(self) -> None:
        self._stopped = True
        for busy in self._busy[: len(self._handles)]:
            busy.acquire(timeout=ABORT_SECONDS)  # no other thread may be in NCCL with its handle
        for handle in self._handles:
            self._nccl.abort(handle)
        self._kept.clear()


class DeviceMemory:
    """See `Memory`. Bytes that go through the communicator are on the GPU, at both ends.

    Its views of device memory are only an address and a length; no code on the host reads them.
    Bytes that are sent with their offer pass through host memory.
    """

    def __init__(self, device: torch.device, to: torch.device) -> None:
        self._device = device
        self._to = to
        self._copies = Copies()

    def outgoing(self, value: Value) -> "_DeviceBytes":
        return _DeviceBytes(value, self._device, self._copies)

    def trim(self) -> None:
        self._copies.trim()

    def close(self) -> None:
        self._copies.close()

    def check_out(self, out: torch.Tensor, offer: Offer) -> None:
        check_receivable(out, offer.header, self._to)

    def allocate(self, offer: Offer, out: torch.Tensor | None) -> torch.Tensor:
        device = torch.device("cpu") if offer.payload is not None else self._device
        value = out if out is not None and out.device == device else empty_tensor(offer.header)
        if value.device != device:  # made from bytes: torch warns for new tensors of some dtypes
            there = torch.empty(value.nbytes, dtype=torch.uint8, device=device)
            value = there.view(value.dtype).view(value.shape)
        _synchronize(device)  # its memory may still be in use by earlier work
        return value

    def writable(self, value: torch.Tensor) -> memoryview:
        return writable_bytes(value)

    def result(self, value: torch.Tensor, out: torch.Tensor | None) -> Value:
        if out is None:
            return value.to(self._to)
        if out is not value:
            # As bytes: there are dtypes that torch cannot copy.
            out.reshape(-1).view(torch.uint8).copy_(value.reshape(-1).view(torch.uint8))
        return out


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    parts = urlsplit(uri)
    device, to = _devices(uri, parts.query)
    upgrade = make_upgrade(version(), device, listen=listen, make_seconds=limits.silence_seconds)
    memory: Memory = DeviceMemory(device, to)
    return open_tcp_end(
        f"nccl://{parts.netloc}",
        listen=listen,
        timeout=timeout,
        token=token,
        limits=limits,
        upgrade=upgrade,
        memory=memory,
    )


def version() -> str:
    """The NCCL version of this end, which must be that of the other end too.

    Raises:
        ConfigError: there is no NCCL here, or it is too old.
    """
    return loaded().version


def make_upgrade(
    version: str, device: torch.device, *, listen: bool, make_seconds: float
) -> Upgrade:
    """The upgrade of a link to an end of the same `version` into one with a communicator."""
    nccl = loaded()

    def upgrade(link: FramedSocket, deadline: float) -> PairLink:
        agree(link, "nccl", version, deadline)

        def make(exchange: Exchange, make_deadline: float) -> Communicator:
            return NcclCommunicator(nccl, exchange, 0 if listen else 1, device, make_deadline)

        return PairLink(link, make, make_seconds)

    return upgrade


def _devices(uri: str, query: str) -> tuple[torch.device, torch.device]:
    """This end's GPU, and the device that it receives to.

    Raises:
        ConfigError: there is no GPU, or the query does not name one of this host.
    """
    named = parse_qs(query)
    if not torch.cuda.is_available():
        raise ConfigError(f"{uri!r} needs a GPU, and torch {torch.__version__} finds none")
    if not named:
        return torch.device("cuda", torch.cuda.current_device()), torch.device("cpu")
    try:
        (text,) = named.pop("device")
        device = torch.device(text)
        if named or device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(text)
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{uri!r}: the only option is ?device=cuda:N, with a GPU of this host"
        ) from error
    device = torch.device("cuda", device.index or 0)
    return device, device


class Nccl:
    """The library. A communicator is an opaque handle; only one thread at a time may use it."""

    def __init__(self, name: str = "libnccl.so.2") -> None:
        """Load the library: the one that torch has already loaded, if any.

        Raises:
            ConfigError: it cannot be loaded, or is older than 2.14.
        """
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise ConfigError(f"an nccl pipe needs NCCL, and {name} cannot be loaded") from error
        number = ctypes.c_int()
        self._check(self._library.ncclGetVersion(ctypes.byref(number)))
        if number.value < 21400:
            raise ConfigError(
                f"NCCL {number.value} is too old: 2.14 (21400) or newer has calls that do not block"
            )
        self.version = str(number.value)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        identity = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(identity)))
        return bytes(identity)

    def init(self, rank: int, unique_id: bytes) -> ctypes.c_void_p:
        """Start a communicator of two ranks on the current device. It is not usable yet: see
        `in_progress`."""
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        communicator = ctypes.c_void_p()
        self._check(
            self._library.ncclCommInitRankConfig(
                ctypes.byref(communicator),
                2,
                _UniqueId.from_buffer_copy(unique_id),
                rank,
                ctypes.byref(config),
            )
        )
        return communicator

    def send(
        self, communicator: ctypes.c_void_p, address: int, nbytes: int, other_rank: int, stream: int
    ) -> None:
        self._move("ncclSend", communicator, address, nbytes, other_rank, stream)

    def recv(
        self, communicator: ctypes.c_void_p, address: int, nbytes: int, other_rank: int, stream: int
    ) -> None:
        self._move("ncclRecv", communicator, address, nbytes, other_rank, stream)

    def _move(
        self,
        name: str,
        handle: ctypes.c_void_p,
        address: int,
        nbytes: int,
        other_rank: int,
        stream: int,
    ) -> None:
        pointer, count = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        function = getattr(self._library, name)
        self._check(function(pointer, count, UINT8, other_rank, handle, ctypes.c_void_p(stream)))

    def in_progress(self, communicator: ctypes.c_void_p) -> bool:
        """Whether the last call on this communicator is still in progress.

        Raises:
            PipeBroken: it failed.
        """
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, ctypes.byref(state)))
        self._check(state.value)
        return state.value == IN_PROGRESS

    def abort(self, communicator: ctypes.c_void_p) -> None:
        """End this communicator, also in the middle of a call. Has been seen to hang."""
        self._library.ncclCommAbort(communicator)

    def _check(self, result: int) -> None:
        if result not in (0, IN_PROGRESS):
            text = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise PipeBroken(f"NCCL: {text}")


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` of NCCL 2.14; later versions accept it, and fill in the fields that they
    added."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_loading: Final = threading.Lock()
_loaded: list[Nccl] = []


def loaded() -> Nccl:
    """The library of this process, loaded on first use."""
    with _loading:
        if not _loaded:
            _loaded.append(Nccl())
        return _loaded[0]


class _DeviceBytes:
    """The bytes of a value to send."""

    def __init__(self, value: Value, device: torch.device, copies: Copies) -> None:
        self._value = value
        self._device = device
        self._copies = copies
        self._viewed = False

    def view(self) -> memoryview:
        self._viewed = True
        return self._view(copy=False)

    def copy(self) -> memoryview:
        few = self._value is None or self._value.nbytes <= INLINE_BYTES
        if few and not self._viewed:
            return HostBytes(self._value, self._copies).copy()  # sent with their offer
        return self._view(copy=True)

    def _view(self, *, copy: bool) -> memoryview:
        if self._value is None:
            return memoryview(b"")
        plain = self._value.detach().resolve_conj().resolve_neg()
        there = plain.to(self._device, copy=copy, memory_format=torch.contiguous_format)
        there = there.contiguous()
        _synchronize(self._device)
        return bytes_at(there.data_ptr(), there.nbytes, keep=there)


def _synchronize(device: torch.device) -> None:
    """Block until all work on the caller's stream is done: the communicator uses another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
