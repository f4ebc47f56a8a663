"""The wire format: what ranks say to each other, byte for byte. Knows no sockets.

Three kinds of conversation use one header:

    ring link      header | payload payload payload ...    a collective, then the next
    mail link      header | payload ...                    a message, then the next
    control link   header | JSON    header | JSON   ...    table, heartbeat, abort

The header has 44 bytes, in network byte order:

     0  magic     4s   "mddp"                10  root      H   a rank
     4  version   B    of this format        12  bucket    h   -1: none
     5  kind      B    Kind                  16  sequence  Q   1, 2, 3, ...
     6  op        B    position in OPS       24  count     Q   elements
     7  reduce    B    ... in REDUCTIONS     32  nbytes    Q   of the payload
     8  dtype     B    ... in DTYPES         40  crc32     I   of the 40 bytes before

Rule 1.  On a ring link the header is a *fingerprint*: every field is the same on all
         ranks that make the same call. So a rank compares 44 bytes with 44 bytes, and
         only if they differ does it look inside to say why. If every rank agrees with
         its left neighbour, all agree.
Rule 2.  Nothing is allocated from a number that a peer sent. On a ring link the
         receiver knows how many bytes must come; on a control link bytes are kept as
         they arrive, and a frame that announces more than CONTROL_LIMIT is refused.
Rule 3.  Payloads are little-endian arrays or JSON. Nothing that is received is ever
executed.

Worked example.  `all_reduce` number 17 of 1,024 float32, summed, for bucket 3:

    Header(Kind.DATA, 17, "all_reduce", "sum", "float32", 0, 3, 1024, 4096)
    -> mddp 01 01 01 01 02 00 0000 0003 0000 ...11 ...0400 ...1000 crc32

In PyTorch: `c10d::CollectiveFingerPrint` (ProcessGroupWrapper.cpp), and only in debug
mode.

Left out: payload checksums (TCP has one; a stronger one costs a pass over memory), and
compression, which belongs to communication hooks.
"""

import json
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAGIC = b"mddp"
VERSION = 1  # of the wire format; both sides of a handshake show theirs
CONTROL_LIMIT = 1 << 20  # bytes of JSON; the table of 10,000 ranks has about 400,000

# A code is a position in its table, and 0 stands for "does not apply".
OPS = (
    *("", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"),
    *("send", "reduce", "gather", "scatter", "all_to_all"),
)
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCTIONS = ("", "sum", "avg", "min", "max", "prod")
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
DTYPES = ("", *FLOATS, *INTEGERS, "bool", "bfloat16")

_LAYOUT = struct.Struct(">4s5BxHh2xQQQ")
_CRC = struct.Struct(">I")
HEADER_BYTES = _LAYOUT.size + _CRC.size  # 44


class FrameError(Exception):
    """These bytes are no frame of ours; the text says which field is wrong.

    Internal: whoever knows the peer turns it into a PeerError that names the rank.
    """


class Kind(IntEnum):
    """What a frame is for: DATA and GPU on ring links, MAIL on mail links, and on
    control links all but DATA and GPU."""

    DATA = 1  # a collective starts; `nbytes` is the size of the array
    GPU = 7  # as DATA, but the array goes by NCCL: of the ring it has the header only
    TABLE = 2  # rank 0 -> all: the address of every rank
    BEAT = 3  # a sign of life; `root` is the sender, `sequence` its latest collective
    ABORT = 4  # to rank 0: an accusation. From rank 0: the verdict
    GOODBYE = 5  # `root` has closed its group after `sequence` collectives
    MAIL = 6  # on a mail link a message follows; else: where to dial `root`


@dataclass(frozen=True, slots=True)
class Header:
    """One header; as a fingerprint it names the call that a rank has entered."""

    kind: Kind
    sequence: int = 0
    op: str = ""
    reduce: str = ""
    dtype: str = ""
    root: int = 0
    bucket: int = -1
    count: int = 0
    nbytes: int = 0

    def pack(self) -> bytes:
        """The 44 bytes of this header."""
        front = _LAYOUT.pack(
            MAGIC,
            VERSION,
            self.kind,
            OPS.index(self.op),
            REDUCTIONS.index(self.reduce),
            DTYPES.index(self.dtype),
            self.root,
            self.bucket,
            self.sequence,
            self.count,
            self.nbytes,
        )
        return front + _CRC.pack(zlib.crc32(front))

    @staticmethod
    def unpack(data: bytes) -> "Header":
        """The header in these 44 bytes.

        Raises: FrameError for anything that `pack` cannot have made.
        """
        if len(data) != HEADER_BYTES:
            raise FrameError(f"a header of {len(data)} bytes instead of {HEADER_BYTES}")
        front, (crc,) = data[: _LAYOUT.size], _CRC.unpack(data[_LAYOUT.size :])
        magic, version, kind, op, reduce, dtype, root, bucket, *rest = _LAYOUT.unpack(
            front
        )
        if magic != MAGIC:
            raise FrameError(f"it starts with {magic!r} instead of {MAGIC!r}")
        if version != VERSION:
            raise FrameError(f"wire version {version}, this rank speaks {VERSION}")
        if crc != zlib.crc32(front):
            raise FrameError("the checksum of the header is wrong")
        try:
            names = OPS[op], REDUCTIONS[reduce], DTYPES[dtype]
            kind = Kind(kind)
        except (IndexError, ValueError) as exc:
            raise FrameError(f"a code that no table has: {exc}") from exc
        sequence, count, nbytes = rest
        return Header(kind, sequence, *names, root, bucket, count, nbytes)

    def __str__(self) -> str:
        """How errors name the call: 'all_reduce #17 of 1,024 float32 (sum, bucket
        3)'."""
        what = f"{self.op} #{self.sequence}"
        if self.op == "barrier":
            return what
        notes = [self.reduce] if self.reduce else []
        notes += [f"root {self.root}"] if self.op in ROOTED else []
        number = "tag" if self.op == "send" else "bucket"
        notes += [f"{number} {self.bucket}"] if self.bucket >= 0 else []
        notes += ["on GPUs"] if self.kind == Kind.GPU else []
        return f"{what} of {self.count:,} {self.dtype}" + (
            f" ({', '.join(notes)})" if notes else ""
        )


# ---- Control frames: a header and a little JSON ----


def control_frame(
    kind: Kind, content: Any = None, root: int = 0, sequence: int = 0
) -> bytes:
    """The bytes of a control frame; `content` is anything that JSON can say."""
    payload = b"" if content is None else json.dumps(content).encode()
    header = Header(kind, sequence, root=root, nbytes=len(payload))
    return header.pack() + payload


class FrameReader:
    """Cuts a stream of bytes, in whatever pieces it arrives, into control frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[Header, Any]]:
        """The (header, content) pairs that these bytes complete, in order.

        Raises: FrameError; the stream has then lost its step and must be closed.
        """
        self._pending += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> tuple[Header, Any] | None:
        if len(self._pending) < HEADER_BYTES:
            return None
        header = Header.unpack(bytes(self._pending[:HEADER_BYTES]))
        if header.nbytes > CONTROL_LIMIT:
            raise FrameError(f"a control frame of {header.nbytes:,} bytes")
        end = HEADER_BYTES + header.nbytes
        if len(self._pending) < end:
            return None
        payload = bytes(self._pending[HEADER_BYTES:end])
        del self._pending[:end]
        try:
            return header, json.loads(payload) if payload else None
        except ValueError as exc:
            raise FrameError(f"the JSON of a {header.kind.name} frame: {exc}") from exc
