"""libnccl by ctypes: the nine functions that a pair of ranks needs.

Not nccl4py: it does not import without cuda-bindings, its extras fix a major version of CUDA and
bring an NCCL of their own beside torch's, and torch's is the one to use. What ctypes calls runs
without the interpreter lock.
"""

import ctypes
import threading
from typing import Final

from lookup_buffer.errors import ConfigError, PipeBroken

UNIQUE_ID_BYTES: Final = 128
UINT8: Final = 1
IN_PROGRESS: Final = 7


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` of NCCL 2.14; later ones take it, and fill in what they added."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class Nccl:
    """The library. A communicator is its handle; one thread at a time uses it."""

    def __init__(self, name: str = "libnccl.so.2") -> None:
        """Load it: the one that torch has loaded already, where there is one.

        Raises:
            ConfigError: it is not there, or older than 2.14.
        """
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise ConfigError(f"an nccl pipe needs NCCL, and {name} cannot be loaded") from error
        number = ctypes.c_int()
        self._check(self._library.ncclGetVersion(ctypes.byref(number)))
        if number.value < 21400:
            raise ConfigError(f"NCCL {number.value} is too old; 2.14 (21400) can do without waits")
        self.version = str(number.value)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        identity = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(identity)))
        return bytes(identity)

    def init(self, rank: int, unique_id: bytes) -> ctypes.c_void_p:
        """A communicator of two ranks on the current device, not yet of use: see `in_progress`."""
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
        self, communicator: ctypes.c_void_p, address: int, nbytes: int, peer: int, stream: int
    ) -> None:
        self._move("ncclSend", communicator, address, nbytes, peer, stream)

    def recv(
        self, communicator: ctypes.c_void_p, address: int, nbytes: int, peer: int, stream: int
    ) -> None:
        self._move("ncclRecv", communicator, address, nbytes, peer, stream)

    def _move(
        self, name: str, handle: ctypes.c_void_p, address: int, nbytes: int, peer: int, stream: int
    ) -> None:
        where, how_many = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        function = getattr(self._library, name)
        self._check(function(where, how_many, UINT8, peer, handle, ctypes.c_void_p(stream)))

    def in_progress(self, communicator: ctypes.c_void_p) -> bool:
        """Whether the last call on it has not come to its end yet.

        Raises:
            PipeBroken: it failed.
        """
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, ctypes.byref(state)))
        self._check(state.value)
        return state.value == IN_PROGRESS

    def abort(self, communicator: ctypes.c_void_p) -> None:
        """End it, whatever it does. Has been seen to hang."""
        self._library.ncclCommAbort(communicator)

    def _check(self, result: int) -> None:
        if result not in (0, IN_PROGRESS):
            said = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise PipeBroken(f"NCCL: {said}")


_loading: Final = threading.Lock()
_loaded: list[Nccl] = []


def loaded() -> Nccl:
    """The process's one."""
    with _loading:
        if not _loaded:
            _loaded.append(Nccl())
        return _loaded[0]
