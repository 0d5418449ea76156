"""The three messages that peers exchange to transfer mass, and how they are encoded.

A transfer works like a bank transfer: the giver debits itself and sends a `Give`; the receiver credits it
once and answers with an `Ack`; a giver that waited too long asks for its mass back with a `Recall`,
which the receiver answers with an `Ack` too. Messages are plain data without behaviour.

A *session* is the random id of one incarnation of a peer's ledger. It is drawn when the ledger is created and
survives a restart from a checkpoint; a peer that starts without a checkpoint has a new session.

An encoded message is a small msgpack header, followed by the value as one raw little-endian buffer.

Layout of an encoded message (all integers little-endian):

    4 bytes   magic "GSMR"
    1 byte    version
    1 byte    reserved, zero
    2 bytes   length of the msgpack header
    header    a flat map of the message's fields, the schema hash and the value's dtype and length; unknown
              fields are ignored
    padding   zero bytes up to a multiple of 8, so that the value is aligned for numpy
    value     raw numbers; absent in messages without a value. With the dtype "packed", a compressed value
              (`Packed`), which `decode` leaves compressed: see `Gossiper.unpacked`

Decoding runs no code from the message, allocates no more memory than the message has, and does not copy the
value: the array is a read-only view. For malformed bytes `decode` raises `WireError` and no other error; its
`cause` is a short identifier by which receivers count and log them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgpack
import numpy as np

from gossamer.errors import GossamerError

from .pushsum import Array, is_finite

Buffer: TypeAlias = bytes | bytearray | memoryview
CompressorHeader: TypeAlias = list[Any]
"""One compressor on the wire: its name, then its parameters (numbers; for low rank, lists of numbers).
Decompressing applies the compressors of a vector in reverse order."""
PackCause: TypeAlias = Literal["garbage", "truncated", "trailing", "non-finite", "too-large"]

MAX_STAGES: Final = 4
"""The most compressors that may be applied to one vector."""
MAX_BLOCKS: Final = 4096
"""The most blocks that the header of a compressor may list."""

Tag: TypeAlias = tuple[int, int]
"""(round, exchange) of a synchronous schedule; asynchronous gossip has no tag."""

Verdict: TypeAlias = Literal["credited", "void"]
"""How a receiver has recorded a transfer: as credited, or as void, that is, never to be credited."""

Answer: TypeAlias = Literal["credited", "void", "gone"]
"""The verdict in an `Ack`. "gone" means "void", and that the receiver has given up the giver's session: the
giver must start a new session."""


# --- compressed values --------------------------------------------------------------------------
# A packed vector is self-describing: to decompress it, a receiver needs the expected length, and for a
# difference the value that it refers to, but not the sender's settings.

_LENGTHS = struct.Struct("<Hqf")


class PackError(GossamerError, ValueError):
    """Bytes that are not a valid compressed vector; `cause` is a short identifier for counters."""

    def __init__(self, cause: PackCause | Literal["no-reference"], message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A compressed vector.

    length: number of values of the vector, according to the sender; a receiver compares it with its own.
    stages: the header of each compressor that was applied, in that order.
    data: the arrays of all compressors, as buffers to be sent one after the other.
    base: if the vector is a difference, the sequence number of the transfer whose value was subtracted;
        negative for a transfer from the receiver to the sender. 0 if it is not a difference.
    gain: the factor by which the decompressed values are multiplied.
    """

    length: int
    stages: tuple[CompressorHeader, ...]
    data: tuple[Buffer, ...]
    base: int = 0
    gain: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without the message's own header."""
        return sum(len(buffer) for buffer in self.buffers())

    def buffers(self) -> list[Buffer]:
        """Return the bytes to send."""
        header = bytes(msgpack.packb(list(self.stages)) or b"")
        return [_LENGTHS.pack(len(header), self.base, self.gain) + header, *self.data]

    @classmethod
    def parse(cls, body: memoryview, length: int) -> Packed:
        """Parse the bytes that `buffers` returned; `unpack` decompresses them later. Raises PackError."""
        if len(body) < _LENGTHS.size:
            raise PackError("truncated", f"{len(body)} bytes are too few for a compressed value")
        size, base, gain = _LENGTHS.unpack_from(body)
        start = _LENGTHS.size + size
        if len(body) < start:
            raise PackError("truncated", "a compressed value ends within its headers")
        try:
            stages = msgpack.unpackb(
                body[_LENGTHS.size : start],
                max_str_len=32, max_bin_len=0, max_ext_len=0, max_map_len=0, max_array_len=MAX_BLOCKS,
            )  # fmt: skip
        except Exception as error:  # msgpack raises half a dozen unrelated types on bad input
            raise PackError(
                "garbage", f"unreadable headers of a compressed value: {error}"
            ) from None
        is_list = isinstance(stages, list) and 1 <= len(stages) <= MAX_STAGES
        if not is_list or not all(
            isinstance(s, list) and s and isinstance(s[0], str) for s in stages
        ):
            raise PackError("garbage", "the headers of a compressed value are not a list of stages")
        if not 0 <= gain <= 1:
            raise PackError("garbage", f"a gain of {gain}: it must lie in 0..1")
        return cls(length, tuple(stages), (body[start:],), base, gain)


class Reader:
    """Reads arrays from a packed vector's bytes, as views: a false length causes no allocation."""

    def __init__(self, packed: Packed) -> None:
        data = packed.data[0] if len(packed.data) == 1 else b"".join(packed.data)
        self._unread = memoryview(data).cast("B")

    def take(self, dtype: str, count: int) -> Array:
        """Return the next `count` numbers."""
        size = count * np.dtype(dtype).itemsize
        if size > len(self._unread):
            raise PackError("truncated", f"{len(self._unread)} bytes left where {size} are needed")
        array = np.frombuffer(self._unread[:size], dtype=dtype)
        self._unread = self._unread[size:]
        return array

    def end(self) -> None:
        """Raise PackError if bytes are left."""
        if len(self._unread):
            raise PackError("trailing", f"{len(self._unread)} bytes after a compressed value")


def as_buffer(array: Array) -> memoryview:
    """Return an array's bytes; its dtype must be little-endian."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data.toreadonly()


def describe(value: object) -> str:
    """Return a short description of a received value, for an error.

    Of lists and maps only the type: formatting one that is nested a thousand levels deep raises
    RecursionError.
    """
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.80}"


def check_count(value: object, low: int, high: int, what: str) -> int:
    """Return a received value if it is an integer within bounds; else raise PackError."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PackError("garbage", f"{what} is {describe(value)}, must lie in {low}..{high}")
    return value


def check_header(header: CompressorHeader, count: int) -> None:
    """Raise PackError unless a compressor's header has this many parameters after its name."""
    if len(header) != count + 1:
        raise PackError("garbage", f"{header[0]}: {len(header) - 1} parameters, {count} are needed")


# --- messages ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Give:
    """Mass that is being transferred: a value and its weight. The sender has already debited itself.

    packed: the compressed form of the value, if it is sent compressed. In a message that was just decoded,
        `value` is then an empty array until `Gossiper.unpacked` decompresses it.
    """

    model: str
    sender: str
    session: str
    sequence: int
    receiver: str
    receiver_session: str
    weight: int
    value: np.ndarray[Any, Any]
    tag: Tag | None = None
    packed: Packed | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """The receiver's answer to a `Give` or a `Recall`.

    `sender` and `session` are those of the peer that answers; `receiver` and `giver_session` those of the
    giver. `sequence` is the giver's last sequence number in the ledger of the peer that answers; it is larger
    than the one in the `Give` or `Recall` if the giver has restarted from an old checkpoint.
    """

    model: str
    sender: str
    session: str
    receiver: str
    giver_session: str
    sequence: int
    verdict: Answer


@dataclass(frozen=True, slots=True)
class Recall:
    """The giver asks for the mass of an open transfer back.

    The receiver answers "credited" if it has credited the transfer already; otherwise it records that this
    sequence number must never be credited, and answers "void".
    """

    model: str
    sender: str
    session: str
    receiver: str
    receiver_session: str
    sequence: int


Message: TypeAlias = Give | Ack | Recall


WireDtype: TypeAlias = Literal["float32", "float64", "float16"]
SchemaEntry: TypeAlias = tuple[str, Sequence[int], str]
"""One field of a model: name, shape, dtype (`("layer1.weight", (300, 784), "float32")`)."""
Cause: TypeAlias = Literal[
    "garbage",  # not a Gossamer message, or one with an inconsistent header
    "truncated",  # shorter than its header says
    "trailing",  # longer than its header says
    "version",  # a Gossamer message of a version that this code does not support
    "unknown-kind",  # neither Give nor Ack nor Recall
    "too-large",
    "non-finite",
    "overflow",  # the value does not fit the dtype chosen for the wire
    "checksum",  # chunks of different messages, or chunks that were corrupted
    "schema",  # the peers' models have different fields
]

MAGIC: Final = b"GSMR"
VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
MAX_HEADER_BYTES: Final = 2048
MAX_HEADER_FIELDS: Final = 32
"""Twenty more than a Give has: fields that later versions add are ignored here, within these bounds."""
MAX_NAME: Final = 64
MAX_WEIGHT_BYTES: Final = 64
PACKED: Final = "packed"
_EMPTY: Final = np.empty(0, dtype=np.float32)

_PREFIX = struct.Struct("<4sBBH")
_ALIGN = 8
_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
}
_DTYPES_BY_WIDTH: Final[list[WireDtype]] = ["float16", "float32", "float64"]


class WireError(GossamerError, ValueError):
    """Bytes that are not a valid message; `cause` is a short identifier for counters."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """A message, and the schema hash and dtype in its header."""

    message: Message
    schema: str
    dtype: WireDtype | Literal["packed"] | None


# --- schemas ---------------------------------------------------------------------------------


def schema_hash(entries: Iterable[SchemaEntry]) -> str:
    """Return a hash of 16 hex characters that is equal for two peers if their models have the same fields.

    It covers the names, shapes and dtypes of the fields, and their order, but not the device that holds them.
    """
    fields = [[name, [int(size) for size in shape], str(dtype)] for name, shape, dtype in entries]
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def schema_difference(ours: Iterable[SchemaEntry], theirs: Iterable[SchemaEntry]) -> str | None:
    """Return a text on the first field in which two schemas differ; None if they are equal."""
    mine, other = (
        [(name, tuple(int(size) for size in shape), str(dtype)) for name, shape, dtype in entries]
        for entries in (ours, theirs)
    )
    for (name, shape, dtype), (name2, shape2, dtype2) in zip(mine, other, strict=False):
        if name != name2:
            return f"field {name!r} here is {name2!r} there"
        if shape != shape2:
            return f"field {name!r} has shape {shape} here and {shape2} there"
        if dtype != dtype2:
            return f"field {name!r} is {dtype} here and {dtype2} there"
    if len(mine) > len(other):
        return f"field {mine[len(other)][0]!r} is missing there"
    if len(other) > len(mine):
        return f"field {other[len(mine)][0]!r} is missing here"
    return None


def require_schema(decoded: Decoded, expected: str) -> None:
    """Raise WireError("schema") unless the message has the schema hash `expected`."""
    if decoded.schema != expected:
        message = decoded.message
        raise WireError(
            "schema",
            f"model {message.model!r} from {message.sender!r} has schema {decoded.schema}, "
            f"ours is {expected}: compare both peers' cards to see which field differs",
        )


# --- encoding --------------------------------------------------------------------------------


def as_sent(value: np.ndarray[Any, Any], dtype: WireDtype = "float32") -> np.ndarray[Any, Any]:
    """Return `value` as its receiver will read it: rounded to the wire's dtype, little-endian, contiguous.

    A sender that debits itself by this result conserves mass in spite of the rounding. Returns `value` itself
    if it needs no conversion.
    """
    if value.ndim != 1:
        raise ValueError(f"a message carries a 1-D value, not one of shape {value.shape}")
    target = _wire_dtype(dtype)
    with np.errstate(over="ignore"):
        sent = np.ascontiguousarray(value, dtype=target)
    if target.itemsize < value.dtype.itemsize and not is_finite(sent):
        raise WireError(
            "overflow",
            f"a value does not fit {dtype}, or is not finite; the largest magnitude is "
            f"{np.abs(value).max():g}: use dtype {'float64' if dtype == 'float32' else 'float32'}",
        )
    return sent


def sufficient_dtype(value: np.ndarray[Any, Any], dtype: WireDtype) -> WireDtype:
    """Return `dtype`, or the next wider one that can represent every entry of a finite value.

    Each message carries its own dtype, so a value that is too large for float16 is sent as float32.
    """
    for name in _DTYPES_BY_WIDTH[_DTYPES_BY_WIDTH.index(dtype) :]:
        target = _wire_dtype(name)
        if value.dtype.itemsize <= target.itemsize or not value.size:
            return name
        if max(value.max(), -value.min()) <= np.finfo(target).max:
            return name
    return "float64"


def encode(message: Message, schema: str, dtype: WireDtype = "float32") -> list[Buffer]:
    """Return the message as buffers to be concatenated.

    The value's buffer is a view of the message's array (a copy only if the dtype changes): send or join the
    buffers before that array is modified. float16 halves the traffic and keeps 3 digits; float64 doubles it
    and is for tests and for exact averages.
    """
    to_session = message.giver_session if isinstance(message, Ack) else message.receiver_session
    kind = _KINDS[type(message)]
    header = {"schema": schema, "kind": kind, "seq": message.sequence, "to_session": to_session}
    buffers: list[Buffer] = []
    if isinstance(message, Ack):
        header["verdict"] = message.verdict
    elif isinstance(message, Give):
        if message.packed is None:
            value = as_sent(message.value, dtype)
            wire_dtype, length = dtype, value.size
            buffers.append(value.view(np.uint8).data)
        else:
            wire_dtype, length = PACKED, message.packed.length
            buffers += message.packed.buffers()
        header["weight"] = _pack_weight(message.weight)
        header["tag"] = None if message.tag is None else list(message.tag)
        header |= {"dtype": wire_dtype, "length": length}
    header |= {
        "vector": message.model,
        "from": message.sender,
        "session": message.session,
        "to": message.receiver,
    }
    _check_header(header)  # raises here for a message that every receiver would reject
    packed = bytes(msgpack.packb(header) or b"")
    padding = bytes(-(_PREFIX.size + len(packed)) % _ALIGN)
    return [_PREFIX.pack(MAGIC, VERSION, 0, len(packed)) + packed + padding, *buffers]


# --- decoding --------------------------------------------------------------------------------


def decode(data: Buffer, max_bytes: int = MAX_MESSAGE_BYTES) -> Decoded:
    """Return the message in `data`. Its value is a read-only view, which keeps `data` in memory.

    Raises WireError if `data` is not a valid message. Lower `max_bytes` to what your largest model needs.
    """
    view = memoryview(data).cast("B").toreadonly()
    if len(view) > max_bytes:
        raise WireError("too-large", f"a message of {len(view)} bytes; the limit is {max_bytes}")
    start, header = _read_header(view)
    kind = header.get("kind", "")
    if kind not in _FIELDS:
        raise WireError("unknown-kind", f"unknown message type {kind!r}")
    _check_header(header)
    body = view[start:]
    if len(body) and kind != "give":
        raise WireError("trailing", f"{len(body)} bytes after a message that carries no value")
    common_fields = {
        "model": header["vector"],
        "sender": header["from"],
        "session": header["session"],
        "receiver": header["to"],
        "sequence": header["seq"],
    }
    to_session = header["to_session"]
    if kind == "ack":
        ack = Ack(**common_fields, giver_session=to_session, verdict=header["verdict"])
        return Decoded(ack, header["schema"], None)
    if kind == "recall":
        return Decoded(Recall(**common_fields, receiver_session=to_session), header["schema"], None)
    dtype, length = header["dtype"], header["length"]
    try:
        packed = Packed.parse(body, length) if dtype == PACKED else None
    except PackError as error:
        raise WireError("garbage", str(error)) from None
    give = Give(
        **common_fields,
        receiver_session=to_session,
        weight=int.from_bytes(header["weight"], "big"),
        value=_EMPTY if packed is not None else _read_value(body, dtype, length),
        tag=None if header["tag"] is None else (header["tag"][0], header["tag"][1]),
        packed=packed,
    )
    return Decoded(give, header["schema"], dtype)


def _read_header(view: memoryview) -> tuple[int, dict[str, Any]]:
    if len(view) < _PREFIX.size:
        cause = "truncated" if MAGIC.startswith(bytes(view[:4])) and len(view) else "garbage"
        raise WireError(cause, f"{len(view)} bytes are too few for a message")
    magic, version, _, length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise WireError("garbage", f"not a message: it starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError("version", f"wire version {version}; this peer supports version {VERSION}")
    if length > MAX_HEADER_BYTES:
        raise WireError("too-large", f"a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
    end = _PREFIX.size + length
    start = end + -end % _ALIGN
    if len(view) < start:
        raise WireError("truncated", f"{len(view)} bytes; the header needs {start}")
    try:
        header = msgpack.unpackb(
            view[_PREFIX.size : end],
            max_str_len=MAX_NAME * 4,
            max_bin_len=MAX_WEIGHT_BYTES,
            max_array_len=2,
            max_map_len=MAX_HEADER_FIELDS,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises many unrelated types on invalid input
        raise WireError("garbage", f"unreadable header: {error}") from None
    if not isinstance(header, dict) or not all(isinstance(key, str) for key in header):
        raise WireError("garbage", "the header is not a map with strings as keys")
    if not isinstance(header.get("kind", ""), str):
        raise WireError("garbage", "the header field 'kind' is not a string")
    return start, header


def _read_value(body: memoryview, dtype: str, length: int) -> np.ndarray[Any, Any]:
    expected = length * _DTYPES[dtype].itemsize
    if len(body) != expected:
        cause = "truncated" if len(body) < expected else "trailing"
        raise WireError(cause, f"a value of {len(body)} bytes; {length} {dtype} need {expected}")
    value = np.frombuffer(body, dtype=_DTYPES[dtype])
    if not is_finite(value):
        raise WireError("non-finite", "the value contains a NaN or an infinity")
    return value


def _pack_weight(weight: int) -> bytes:
    if weight < 0:
        raise ValueError(f"a transfer's weight cannot be negative: {weight}")
    return weight.to_bytes((weight.bit_length() + 7) // 8 or 1, "big")


def _wire_dtype(dtype: str) -> np.dtype[Any]:
    if dtype not in _DTYPES:
        raise ValueError(f"unknown wire dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


# --- checks of header fields --------------------------------------------------------------------


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_tag(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(_is_count(part) for part in value)
    )


_COMMON: dict[str, Callable[[object], bool]] = {
    "kind": _is_name,
    "schema": _is_name,
    "vector": _is_name,
    "from": _is_name,
    "session": _is_name,
    "to": _is_name,
    "to_session": _is_name,
    "seq": _is_count,
}
_KINDS: dict[type[Message], str] = {Give: "give", Ack: "ack", Recall: "recall"}
_FIELDS: dict[str, dict[str, Callable[[object], bool]]] = {
    "give": _COMMON
    | {
        "weight": lambda value: isinstance(value, bytes) and 1 <= len(value) <= MAX_WEIGHT_BYTES,
        "tag": _is_tag,
        "dtype": lambda value: isinstance(value, str) and (value in _DTYPES or value == PACKED),
        "length": _is_count,
    },
    "ack": _COMMON | {"verdict": lambda value: value in ("credited", "void", "gone")},
    "recall": _COMMON,
}


def _check_header(header: dict[str, Any]) -> None:
    fields = _FIELDS[header["kind"]]
    if missing := sorted(fields.keys() - header.keys()):
        raise WireError("garbage", f"header fields are missing: {', '.join(missing)}")
    for name, valid in fields.items():
        if not valid(header[name]):
            raise WireError("garbage", f"header field {name!r} cannot be {describe(header[name])}")
