"""The network lab: a slow network on one machine, without root.

    MINDDP_NETLAB="rate=100mbit, delay=2ms" minddp run -n 3 train.py
    MINDDP_NETLAB="rate=1gbit, delay=1ms, jitter=0.2ms; rank 2: rate=100mbit"

    rate     bits a second, headers included   bit, kbit, mbit, gbit (decimal, as in tc)
    delay    how long a bit travels            us, ms, s
    jitter   how much longer or shorter, at most; evenly distributed, not above delay

Settings after `rank R:` hold for that rank alone, and there win over the first ones: it
has a bad network card, which is slow both ways. Without a rate it is 10gbit. A *cable*
then lies between every link to a right neighbour and its connection: a thread, which
hands on no piece before its time.

    pump --> local socket pair --> cable --> TCP over loopback --> right neighbour
                                     |
                    intake  1.0 ms   |  a piece of 12 kB comes
                    wire    2.0 ms   |  its last bit is out: 12 kB at 100 Mbit/s
                    due     4.0 ms   |  and has arrived: 2 ms of delay later

Rule 1.  A piece begins when the one before it is out, and not before it came. Its time
         is computed, not slept, so that waking late does not add up.
Rule 2.  The cable takes no more than what is under way and what a send buffer would
         hold. So a sender feels the wire as it feels a real one.
Rule 3.  A link is as bad as the worse of its ends: the lower rate, the longer delay.
Rule 4.  A link that is closed delivers what it has taken, and `close` waits for that. A
         peer that is gone ends the cable, and the next send raises PeerLost.
Rule 5.  All ranks have the same lab, rank 0 says so, and every figure is to be marked.

Emulated: rate, with the 66 bytes of headers that TCP over Ethernet adds to each 1,448;
delay; jitter, without overtaking; slow ranks. Not emulated: loss, congestion control
(slow start), and what links share: each direction of each link has the rate to itself.
Links of a ring are slowed down and those of messages (send, recv); not rendezvous, nor
the control plane, so word of a failure may overtake data. And the cables need the
processors on which the ranks compute: at some Gbit/s they are the slower wire.

In PyTorch: nothing; its authors had the machines [Li et al. 2020]. Linux shapes a real
interface, as root: `man tc-tbf`, `man tc-netem`.

Left out: loss; queues that several links share; links faster than loopback.
"""

import os
import random
import re
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from minddp.errors import PeerLost, UsageError
from minddp.net import PAIR_BYTES, Alarm, Link, Socket, local_pair

TCP_SEGMENT_BYTES = 1448  # what fits into one packet of Ethernet
TCP_HEADER_BYTES = 66  # of TCP, IP and Ethernet, on each
PIECE_SECONDS, PIECE_BYTES = 1e-3, 256 * 1024  # what is handed on at a time, at most
BUFFER_SECONDS, BUFFER_BYTES = 0.02, 4 * 2**20  # what a send buffer holds, at most
LOOK_SECONDS = 0.05  # how often a cable that takes nothing looks whether it is to end
PATIENCE = 1.0  # seconds in which a peer is to take what came in time
MOST_DESCRIPTORS = 1024  # of `select`, which unlike `poll` counts microseconds

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
UNITS = {"rate": RATES, "delay": TIMES, "jitter": TIMES}
EXAMPLE = '"rate=1gbit, delay=2ms; rank 2: rate=100mbit"'


@dataclass(frozen=True)
class Quality:
    """What a cable is like: rate in bit/s, delay and jitter in seconds."""

    rate: float = 10e9
    delay: float = 0.0
    jitter: float = 0.0

    def seconds(self, count: int) -> float:
        """How long the wire is busy with so many bytes and their headers."""
        headers = -(-count // TCP_SEGMENT_BYTES) * TCP_HEADER_BYTES
        return (count + headers) * 8 / self.rate

    def worse(self, other: "Quality") -> "Quality":
        return Quality(
            min(self.rate, other.rate),
            max(self.delay, other.delay),
            max(self.jitter, other.jitter),
        )


@dataclass(frozen=True)
class Lab:
    """An emulated network: how each rank of the world is connected."""

    text: str
    usual: Quality
    special: Mapping[int, Quality]

    def between(self, a: int, b: int) -> Quality:
        """The link from rank a to rank b of the world."""
        one, other = (self.special.get(rank, self.usual) for rank in (a, b))
        return one.worse(other)

    def check(self, world_size: int) -> None:
        """Raises: UsageError if it speaks of ranks that the world does not have."""
        for rank in self.special:
            if rank >= world_size:
                raise _wrong(self.text, f"there is no rank {rank} among {world_size}")

    def __str__(self) -> str:
        return self.text


# ---- What the user wishes ----


def from_environment(env: Mapping[str, str] = os.environ) -> Lab | None:
    """The lab that MINDDP_NETLAB asks for; None if it is not set.

    Raises: UsageError saying which part of it is wrong.
    """
    text = env.get("MINDDP_NETLAB", "").strip()
    return parse(text) if text else None


def parse(text: str) -> Lab:
    """The lab of a text like EXAMPLE. Raises: UsageError."""
    usual, special = Quality(), dict[int, Quality]()
    for part in text.rstrip("; ").split(";"):
        whose, colon, settings = part.rpartition(":")
        if not colon:
            if special or usual != Quality():
                raise _wrong(text, f"{part.strip()!r} comes after the first ';'")
            usual = _changed(usual, settings, text)
            continue
        found = re.fullmatch(r"rank (\d{1,5})", whose.strip())
        if not found or int(found[1]) in special:
            raise _wrong(text, f"{whose.strip()!r} is no rank, or comes twice")
        special[int(found[1])] = _changed(usual, settings, text)
    return Lab(text, usual, special)


def _changed(usual: Quality, settings: str, text: str) -> Quality:
    """The usual quality with settings like "rate=1gbit, delay=2ms" in its place."""
    values: dict[str, float] = {}
    for setting in settings.split(","):
        key, _, value = (word.strip() for word in setting.partition("="))
        if key not in UNITS:
            raise _wrong(text, f"{key!r} is none of {', '.join(UNITS)}")
        if key in values:
            raise _wrong(text, f"{key} comes twice")
        units = UNITS[key]
        found = re.fullmatch(r"(\d+\.?\d*) *([a-z]+)", value)
        if not found or found[2] not in units:
            known = ", ".join(units)
            raise _wrong(text, f"{key}={value} is no number with a unit of {known}")
        values[key] = float(found[1]) * units[found[2]]
    quality = replace(usual, **values)
    if not 1e3 <= quality.rate <= 1e12:
        raise _wrong(text, "a rate is from 1kbit to 1000gbit")
    if quality.delay > 60:
        raise _wrong(text, "a delay is at most 60s")
    if quality.jitter > quality.delay:
        raise _wrong(text, "jitter is at most delay, for no bit arrives before it left")
    return quality


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(f"MINDDP_NETLAB={text!r}: {why}. Write it like {EXAMPLE}.")


# ---- The cable ----


class EmulatedLink(Link):
    """A link that sends through a cable of this quality; it is only sent on."""

    def __init__(self, link: Link, quality: Quality, alarm: Alarm | None = None):
        outer, intake = local_pair()
        super().__init__(outer, link.peer, link.address, link.local_host)
        self._cable = Cable(intake, link, quality)
        self._alarm = alarm

    def close(self) -> None:
        """Close; returns when what was taken has been delivered, or nobody takes it.

        Of a group that has failed nothing is delivered: its errors must not wait.
        """
        super().close()
        self._cable.close(deliver=not (self._alarm and self._alarm.error))


class Cable:
    """Carries what comes out of `intake` to `link`, each piece not before its time."""

    def __init__(self, intake: Socket, link: Link, quality: Quality):
        if intake.fileno() >= MOST_DESCRIPTORS:
            raise UsageError(
                f"the network lab needs descriptors below {MOST_DESCRIPTORS}; this "
                "process has too many open"
            )
        self._intake, self._link, self._quality = intake, link, quality
        segments = int(quality.rate / 8 * PIECE_SECONDS) // TCP_SEGMENT_BYTES
        most = max(1, segments) * TCP_SEGMENT_BYTES
        self._piece_bytes = min(most, PIECE_BYTES)
        travel = quality.delay + quality.jitter
        buffer = min(quality.rate / 8 * BUFFER_SECONDS, BUFFER_BYTES)
        self._capacity = quality.rate / 8 * travel + buffer
        self._random = random.Random(link.peer)
        self._out = 0.0  # when the last piece has left
        self._end = float("inf")  # when to give up, once the link is closed
        self._thread = threading.Thread(target=self._run, name="minddp-cable")
        self._thread.daemon = True
        self._thread.start()

    def close(self, deliver: bool = True) -> None:
        """The link has been closed: deliver what is under way, or do not, and end."""
        held = self._quality.seconds(int(self._capacity) + PAIR_BYTES)
        patience = held + 2 * self._quality.delay + PATIENCE
        self._end = time.monotonic() + (patience if deliver else 0)
        self._thread.join()
        self._forget()  # a forked child has descriptors, but no such thread

    def _forget(self) -> None:
        self._intake.close()
        self._link.close()

    def _run(self) -> None:
        try:
            self._carry()
        except PeerLost:
            pass  # whoever sends next is told, by a pair that has no other end
        finally:
            self._forget()

    def _carry(self) -> None:
        """Take, wait and deliver until the link has been closed and all is there."""
        under_way: deque[tuple[float, bytes]] = deque()  # (when it is due, a piece)
        held, is_open = 0, True
        while (is_open or under_way) and time.monotonic() < self._end:
            while under_way and under_way[0][0] <= time.monotonic():
                _, piece = under_way.popleft()
                self._deliver(piece)
                held -= len(piece)
            rest = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            if not is_open or held > self._capacity:
                time.sleep(min(rest or 0, LOOK_SECONDS))
            elif select.select([self._intake], [], [], rest)[0]:
                piece = self._intake.recv(self._piece_bytes)
                is_open = bool(piece)
                held += len(piece)
                if piece:
                    under_way.append((self._due(len(piece)), piece))

    def _due(self, count: int) -> float:
        """When so many bytes, which come now, have arrived."""
        q = self._quality
        self._out = max(self._out, time.monotonic()) + q.seconds(count)
        return self._out + q.delay + self._random.uniform(-q.jitter, q.jitter)

    def _deliver(self, piece: bytes) -> None:
        """Raises: PeerLost, also if nobody takes it although the link is closed."""
        rest = memoryview(piece)
        while rest:
            sent = self._link.send_some([rest])
            rest = rest[sent:]
            if not sent:
                if time.monotonic() > self._end:
                    raise PeerLost("takes nothing more", self._link.peer)
                select.select([], [self._link], [], 0.1)
