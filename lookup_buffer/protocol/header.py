"""Headers: the description of a tensor beside its bytes, and its validation.

The dtype table has names and widths, so a node needs no torch. A header from outside is not
trusted: every field is checked before memory is allocated for it. Pure data; any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from lookup_buffer.errors import InvalidKey, ProtocolError
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey
from lookup_buffer.protocol.framing import pack, unpack

DTYPES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    # torch stores each element of these in one byte.
    **{f"int{bits}": 1 for bits in range(1, 8)},
    **{f"uint{bits}": 1 for bits in range(1, 8)},
}
"""The supported dtypes: torch's name without `torch.` → bytes of one element."""

MAX_DIMENSIONS: Final = 16
MAX_TENSOR_BYTES: Final = 1 << 40
"""The default bound on one tensor's bytes; a node passes its own, smaller one."""

_MAX_DTYPE_CHARACTERS: Final = 32
_MAX_NAMESPACE_CHARACTERS: Final = 256
_MAX_TTL_MS: Final = 1 << 53
_UINT64_END: Final = 1 << 64

_TENSOR_FIELDS: Final = frozenset({"dtype", "shape", "nbytes", "kind"})
_PAYLOAD_FIELDS: Final = _TENSOR_FIELDS | {"namespace", "key", "generation", "checksum", "ttl_ms"}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Dtype, shape and size of a value. Plain data: it can be pickled and put into msgpack.

    `kind` is "tensor", or "none" for a stored `None`, whose other fields are `""`, `()` and 0.
    The constructor checks nothing; `validate` does.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: Literal["tensor", "none"] = "tensor"

    @classmethod
    def of_none(cls) -> "TensorHeader":
        """The header of a stored `None`."""
        return cls("", (), 0, "none")

    @classmethod
    def for_tensor(cls, dtype: str, shape: tuple[int, ...]) -> "TensorHeader":
        """The header of a tensor, with its computed size. `dtype` must be in `DTYPES`."""
        nbytes = DTYPES[dtype]
        for size in shape:
            nbytes *= size
        return cls(dtype, shape, nbytes)

    def validate(self, *, max_nbytes: int = MAX_TENSOR_BYTES) -> None:
        """Check a header from outside.

        Raises:
            ProtocolError: the fields have wrong types, contradict each other, or exceed a bound.
        """
        nbytes = _checked_int("nbytes", self.nbytes, 0, max_nbytes + 1)
        if self.kind == "none":
            if self.dtype != "" or self.shape != () or nbytes != 0:
                raise ProtocolError("bad header: a None with a dtype, shape or size")
            return
        if self.kind != "tensor":
            raise ProtocolError("bad header: kind is neither 'tensor' nor 'none'")
        if _checked_str("dtype", self.dtype, _MAX_DTYPE_CHARACTERS) not in DTYPES:
            raise ProtocolError("bad header: unknown dtype")
        if len(self.shape) > MAX_DIMENSIONS:
            raise ProtocolError(f"bad header: more than {MAX_DIMENSIONS} dimensions")
        product = reach = DTYPES[self.dtype]
        for size in self.shape:
            # Every size is below 2**63, so 16 of them cannot grow these numbers without bound.
            product *= _checked_int("a dimension", size, 0, 1 << 63)
            reach *= size or 1
        if reach >= 1 << 63:
            raise ProtocolError("bad header: the non-empty dimensions exceed 2**63 bytes")
        if product != nbytes:
            raise ProtocolError("bad header: nbytes does not match dtype and shape")

    def to_fields(self) -> dict[str, Any]:
        """As plain data, for use inside a larger message."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "kind": self.kind,
        }

    @classmethod
    def from_fields(cls, fields: object, *, max_nbytes: int = MAX_TENSOR_BYTES) -> "TensorHeader":
        """The validated header in plain data from outside.

        Raises:
            ProtocolError: see `validate`; also for missing and unknown fields.
        """
        header = _tensor_header(_checked_fields(fields, _TENSOR_FIELDS))
        header.validate(max_nbytes=max_nbytes)
        return header


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """The header before a tensor's bytes between nodes: its identity, checksum and expiry.

    The receiver compares namespace, key and generation with its request, and the checksum with the
    bytes, because the location in Redis may be out of date. `ttl_ms` is the remaining time to live
    (None: no expiry), so that a copy expires with its original.
    """

    namespace: str
    key: str
    generation: int
    checksum: int
    ttl_ms: int | None
    tensor: TensorHeader

    def validate(self, *, max_nbytes: int = MAX_TENSOR_BYTES) -> None:
        """Check a header from outside.

        Raises:
            ProtocolError: the fields have wrong types, contradict each other, or exceed a bound.
        """
        _checked_str("namespace", self.namespace, _MAX_NAMESPACE_CHARACTERS)
        try:
            TensorKey.parse(_checked_str("key", self.key, MAX_KEY_CHARACTERS))
        except InvalidKey as error:
            raise ProtocolError("bad header: key is not the text of a key") from error
        _checked_int("generation", self.generation, 1, _UINT64_END)
        _checked_int("checksum", self.checksum, 0, _UINT64_END)
        if self.ttl_ms is not None:
            _checked_int("ttl_ms", self.ttl_ms, 0, _MAX_TTL_MS)
        if not isinstance(self.tensor, TensorHeader):
            raise ProtocolError("bad header: no tensor header")
        self.tensor.validate(max_nbytes=max_nbytes)

    def to_fields(self) -> dict[str, Any]:
        """As plain data: one flat map."""
        return {
            "namespace": self.namespace,
            "key": self.key,
            "generation": self.generation,
            "checksum": self.checksum,
            "ttl_ms": self.ttl_ms,
            **self.tensor.to_fields(),
        }

    @classmethod
    def from_fields(cls, fields: object, *, max_nbytes: int = MAX_TENSOR_BYTES) -> "PayloadHeader":
        """The validated header in plain data from outside.

        Raises:
            ProtocolError: see `validate`; also for missing and unknown fields.
        """
        checked = _checked_fields(fields, _PAYLOAD_FIELDS)
        header = cls(
            namespace=checked["namespace"],
            key=checked["key"],
            generation=checked["generation"],
            checksum=checked["checksum"],
            ttl_ms=checked["ttl_ms"],
            tensor=_tensor_header(checked),
        )
        header.validate(max_nbytes=max_nbytes)
        return header

    def pack(self) -> bytes:
        """The msgpack bytes of `to_fields`."""
        return pack(self.to_fields())

    @classmethod
    def unpack(
        cls, data: bytes | bytearray | memoryview, *, max_nbytes: int = MAX_TENSOR_BYTES
    ) -> "PayloadHeader":
        """The validated header in these bytes.

        Raises:
            ProtocolError: not msgpack, trailing bytes, or not a valid header.
        """
        return cls.from_fields(unpack(data), max_nbytes=max_nbytes)


def _tensor_header(fields: dict[str, Any]) -> TensorHeader:
    shape = fields["shape"]
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"bad header: shape is not a list of at most {MAX_DIMENSIONS} sizes")
    return TensorHeader(fields["dtype"], tuple(shape), fields["nbytes"], fields["kind"])


def _checked_fields(fields: object, names: frozenset[str]) -> dict[str, Any]:
    if not isinstance(fields, dict) or fields.keys() != names:
        raise ProtocolError(f"bad header: not a map of exactly {', '.join(sorted(names))}")
    return fields


def _checked_int(name: str, value: object, low: int, end: int) -> int:
    # In Python a bool is an int; in this protocol it is not.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < end:
        raise ProtocolError(f"bad header: {name} is not an integer in the allowed range")
    return value


def _checked_str(name: str, value: object, max_characters: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= max_characters:
        raise ProtocolError(f"bad header: {name} is not a text of 1 to {max_characters} characters")
    return value
