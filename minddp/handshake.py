"""The handshake: both sides prove that they hold the job's token, and say who they are.

A handshake is written as two generators, which read like a conversation and know no
sockets. Each `yield` means "send these bytes, then bring me that many":

    dialing side (introduce)                      listening side (answer)

      HELLO  role, rank, world size, job, nonce  --->
                                                 <---  CHALLENGE  version, nonce
      PROOF  HMAC("dialer", all of the above)    --->
                                                 <---  REPLY  welcome, or why not,
                                                       HMAC("listener", all of it)

Rule 1.  Until the dialer has proved the token it learns nothing: a stranger gets a
         nonce and a closed connection. After that, a refusal comes with its reason in
         words.
Rule 2.  Every message has a fixed size, all together under 256 bytes a side. Whoever
         sends something else is dropped at the first four bytes.

An HMAC is a checksum that only a holder of the key can make, a nonce a number that is
used once. Our HMAC-SHA256 (RFC 2104) covers the side, so that a proof cannot be
reflected; role and rank, so that it cannot be used for another seat; both nonces, so
that it cannot be replayed. Without a token the key is empty: the same conversation
still keeps other jobs, other versions and stray HTTP clients out, but anybody on the
machine could join. Hence loopback only.

In PyTorch: nothing; its security policy asks for a trusted network.

Left out: encryption (use a VPN or an SSH tunnel between hosts that do not trust their
network), and defence against a rank that holds the token and lies.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from minddp.frame import MAGIC, VERSION

CONTROL, RING, MAIL = 1, 2, 3  # roles: what the connection will be used for
NONCE = MAC = 32  # bytes

_HELLO = struct.Struct(">4sBB2xII32s16sH32s")
_CHALLENGE = struct.Struct(">4sB3x32s")
_REPLY = struct.Struct(">B120s32s")

Script = Generator[tuple[bytes, int], bytes, "Hello"]


class HandshakeError(Exception):
    """This connection will not become a link; the text says why."""


class Stranger(HandshakeError):
    """Whatever is at the other end, it is no rank of this job."""


@dataclass(frozen=True)
class Hello:
    """Who is calling: the seat a connection asks for, and where its rank can be
    dialled."""

    role: int
    rank: int
    world_size: int
    job: str
    host: str = "0.0.0.0"
    port: int = 0

    def pack(self, nonce: bytes) -> bytes:
        who = self.role, self.rank, self.world_size, _digest(self.job)
        where = _packed(self.host), self.port
        return _HELLO.pack(MAGIC, VERSION, *who, *where, nonce)


def introduce(me: Hello, token: bytes) -> Script:
    """The dialing side. Returns `me` once the listener has proved the token as well.

    Raises: HandshakeError with the listener's reason, or if the listener is no minddp.
    """
    hello = me.pack(secrets.token_bytes(NONCE))
    start = yield hello, len(MAGIC)
    if start != MAGIC:
        raise HandshakeError(f"it {looks_like(start)}, not minddp")
    rest = yield b"", _CHALLENGE.size - len(MAGIC)
    _, version, nonce = _CHALLENGE.unpack(start + rest)
    if version != VERSION:
        raise HandshakeError(f"it speaks wire version {version}, this rank {VERSION}")

    proof = _mac(token, b"dialer", hello, nonce)
    welcome, reason, mac = _REPLY.unpack((yield proof, _REPLY.size))
    said = nonce + bytes([welcome]) + reason
    if not hmac.compare_digest(mac, _mac(token, b"listener", hello, said)):
        raise HandshakeError("it does not hold the token of this job (MINDDP_TOKEN)")
    if not welcome:
        raise HandshakeError(reason.rstrip(b"\0").decode(errors="replace"))
    return me


def answer(me: Hello, token: bytes, objection: Callable[[Hello], str | None]) -> Script:
    """The listening side. Returns the caller's Hello once it is proved and welcome.

    `objection(hello)` may give a reason to refuse (None: welcome); it is asked only
    after the caller has proved the token.

    Raises: Stranger, or HandshakeError after a refusal.
    """
    start = yield b"", len(MAGIC)
    if start != MAGIC:
        raise Stranger(looks_like(start))
    hello = start + (yield b"", _HELLO.size - len(MAGIC))
    _, version, role, rank, world_size, job, host, port, _ = _HELLO.unpack(hello)
    nonce = secrets.token_bytes(NONCE)
    challenge = _CHALLENGE.pack(MAGIC, VERSION, nonce)
    if version != VERSION:
        yield challenge, 0  # so that the other side can name both versions as well
        raise Stranger(f"speaks wire version {version}, this rank {VERSION}")
    proof = yield challenge, MAC
    if not hmac.compare_digest(proof, _mac(token, b"dialer", hello, nonce)):
        raise Stranger("does not hold the token of this job")

    caller = Hello(role, rank, world_size, me.job, _unpacked(host), port)
    reason = _wrong_job(me, caller, job) or objection(caller)
    said = struct.pack(">?120s", not reason, (reason or "").encode()[:120])
    yield said + _mac(token, b"listener", hello, nonce + said), 0
    if reason:
        raise HandshakeError(f"rank {rank} was refused: {reason}")
    return caller


def looks_like(start: bytes) -> str:
    """What the first bytes of a stranger suggest, for the log."""
    if start[:1] == b"\x16":
        return "speaks TLS"
    if start[:4] in (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"HTTP"):
        return "speaks HTTP"
    if start[:4] == b"SSH-":
        return "speaks SSH"
    return f"begins with {start!r}" if start else "said nothing"


def _wrong_job(me: Hello, caller: Hello, job: bytes) -> str | None:
    if job != _digest(me.job):
        return "it belongs to another job (MINDDP_JOB_ID differs)"
    if caller.world_size != me.world_size:
        return (
            f"its WORLD_SIZE is {caller.world_size}, rank {me.rank}'s {me.world_size}"
        )
    if caller.rank >= me.world_size:
        return f"its RANK is {caller.rank} of {me.world_size}"
    return None


def _digest(job: str) -> bytes:
    """A job's name in 32 bytes, however long it is."""
    return hashlib.sha256(job.encode()).digest()


def _mac(token: bytes, side: bytes, hello: bytes, rest: bytes) -> bytes:
    text = b"minddp handshake, " + side + hello + rest
    return hmac.digest(token, text, "sha256")


def _packed(host: str) -> bytes:
    """16 bytes of any address, IPv4 as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2)."""
    address = ip_address(host.split("%")[0])
    mapped = address if address.version == 6 else IPv6Address(f"::ffff:{address}")
    return mapped.packed


def _unpacked(packed: bytes) -> str:
    address = IPv6Address(packed)
    return str(address.ipv4_mapped or address)
