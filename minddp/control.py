r"""The control plane: a star of links to rank 0, over which ranks live, fail and leave.

           rank 0          Each rank runs one thread that owns its control links. Over
          /   |   \         them go only small frames (frame.py):
         1    2    3

    TABLE    0 -> all        where every rank can be dialled
    BEAT     both ways       "I am alive, and in collective #17", every 2 seconds
    ABORT    r -> 0          an accusation: "rank 1 closed its connection during #17"
             0 -> all        the verdict (verdict.py), the same for all ranks
    GOODBYE  r -> 0 -> all   "I closed my group after 17 collectives"
    MAIL     r -> 0 -> all   "dial me there with your messages" (mailbox.py)

Rule 1.  Only the thread touches the links. Others leave it a note and wake it.
Rule 2.  The first verdict is final. It sounds the alarm, which wakes whoever waits in a
         collective; from then on every call of the group raises it.
Rule 3.  The heart beats from this thread: a long computation does not silence it,
         SIGSTOP does. Silence alone accuses nobody, since slow is not dead; it is
         evidence, once somebody's deadline has passed.

In PyTorch: `c10d::TCPStore` and ProcessGroupNCCL's heartbeat monitor.

Left out: a successor for rank 0; ranks that join later.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from minddp.errors import PeerError, PeerLost, PeerTimeout
from minddp.frame import FrameError, FrameReader, Header, Kind, control_frame
from minddp.net import Alarm, Deadline, Link
from minddp.verdict import (
    Accusation,
    Pulse,
    odd_one_out,
    who_did_not_come,
    who_is_missing,
)

BEAT_SECONDS = 2.0
MISMATCH_SECONDS = 0.2  # how long the judge waits for the other side of a mismatch
VERDICT_SECONDS = 0.8  # how long an accuser waits for rank 0
READ_BYTES = 64 * 1024


class Control:
    """One rank's end of the star."""

    def __init__(self, rank: int, world_size: int, alarm: Alarm, timeout: float):
        self.rank, self.world_size = rank, world_size
        self.bytes_sent = 0
        self.entered = 0  # sequence number of the latest collective; the group sets it
        self.departed: dict[int, int] = {}  # rank -> after how many collectives it left
        self.table: list[tuple[str, int]] | None = None
        self.mailboxes: dict[int, tuple[str, int]] = {}  # rank -> where it takes mail
        self.mail_came: Callable[[], None] = lambda: None  # called when one is added
        self.verdict: Accusation | None = None
        # A stopped rank must miss two beats before the others' deadline.
        self.beat_seconds = min(BEAT_SECONDS, timeout / 4)
        self._alarm = alarm
        self._peers: dict[int, _Peer] = {}
        self._notes: deque[tuple[str, Any]] = deque()
        self._mismatches: list[Accusation] = []
        self._judge_at, self._failed = float("inf"), False
        self._turn, self._gap = time.monotonic(), 0.0  # how regularly this thread runs
        self._table_came, self._judged = threading.Event(), threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._guarded, name="minddp-control")
        self._thread.daemon = True
        self._thread.start()

    # ---- What the other modules ask for (any thread) ----

    def add(self, rank: int, link: Link) -> None:
        """Take over the link to a rank that has joined."""
        self._post("add", (rank, link))

    def publish(self, table: list[tuple[str, int]]) -> None:
        """Rank 0: everyone has joined; tell them where everyone is."""
        self._post("table", table)

    def wait_for_table(self, deadline: Deadline, where: str) -> list[tuple[str, int]]:
        """The address of every rank. `where` rank 0 was joined, for the error.

        Raises: the verdict, or PeerTimeout if neither came before the deadline.
        """
        self._table_came.wait(deadline.left())
        if self._alarm.error:
            raise self._alarm.error
        if self.table is None:
            raise PeerTimeout(
                f"rank {self.rank} joined rank 0 at {where}, but not all ranks did "
                f"within {deadline.seconds:g} s",
                0,
            )
        return self.table

    def invite(self, host: str, port: int) -> None:
        """Tell all ranks where they can dial us with their messages."""
        self._post("invite", [host, port])

    def accuse(self, error: PeerError) -> PeerError:
        """Report a failure to rank 0, and get the error that this rank is to raise."""
        mine = Accusation.of(error, by=self.rank)
        if not self.verdict:
            self._post("accuse", mine)
            self._judged.wait(VERDICT_SECONDS)
        return self._choose(mine, error)

    def forget(self) -> None:
        """In a forked child, which has no such thread: close its descriptors."""
        for peer in self._peers.values():
            peer.link.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def leave(self) -> None:
        """Say goodbye, deliver what is due, and end the thread."""
        self._post("leave", None)
        self._thread.join()  # it only moves what the kernel takes, so it is quick
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- The thread ----

    def _post(self, note: str, content: Any) -> None:
        self._notes.append((note, content))
        os.write(self._wake_write, b"!")

    def _guarded(self) -> None:
        """Nobody is to wait for a thread that has died of a mistake of ours."""
        try:
            self._run()
        except Exception as exc:
            text = f"rank {self.rank} lost its control thread: {exc!r}"
            self._decide(Accusation("lost", self.rank, self.rank, text))
            raise

    def _run(self) -> None:
        next_beat = time.monotonic()
        leaving = False
        while not leaving:
            self._wait(min(next_beat, self._judge_at) - time.monotonic())
            self._note_gap()
            for peer in list(self._peers.values()):
                self._read(peer)
            while self._notes:
                leaving |= self._obey(*self._notes.popleft())
            now = time.monotonic()
            if now >= next_beat:
                self._send(Kind.BEAT, root=self.rank, sequence=self.entered)
                next_beat = now + self.beat_seconds
            if now >= self._judge_at:
                self._judge_at = float("inf")
                self._decide(odd_one_out(self._mismatches))
        for peer in list(self._peers.values()):
            self._read(peer)  # closed unread, it would cut off what we just sent
            peer.link.close()

    def _note_gap(self) -> None:
        """Time in which this thread did not run is no silence of the others."""
        now = time.monotonic()
        self._gap, self._turn = now - self._turn, now
        if self._gap > 2 * self.beat_seconds:
            for peer in self._peers.values():
                peer.last_beat = now

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for peer in self._peers.values():
            poll.register(peer.link, select.POLLIN | (select.POLLOUT * bool(peer.due)))
        ready = poll.poll(max(0.0, seconds) * 1000 + 1)
        if any(fd == self._wake_read for fd, _ in ready):
            os.read(self._wake_read, 4096)

    def _obey(self, note: str, content: Any) -> bool:
        """Do what another thread asked for; True if it is time to leave."""
        if note == "add":
            rank, link = content
            self._peers[rank] = _Peer(rank, link)
            if self.verdict:
                self._send(Kind.ABORT, asdict(self.verdict))
        elif note == "table":
            self.table = content
            self._table_came.set()
            self._send(Kind.TABLE, content)
        elif note == "accuse":
            self._report(content)
        elif note == "invite":
            self._send(Kind.MAIL, content, root=self.rank)
        elif note == "tell":
            self._send(Kind.ABORT, asdict(content))
        elif note == "leave" and not (self.verdict or self._failed):
            self._send(Kind.GOODBYE, root=self.rank, sequence=self.entered)
        return note == "leave"

    def _send(self, kind: Kind, content: Any = None, **fields: int) -> None:
        """To rank 0; from rank 0, to all."""
        for peer in list(self._peers.values()):
            deaf = bool(peer.due)
            if kind != Kind.BEAT or not deaf:  # beats are not to pile up
                peer.due += control_frame(kind, content, **fields)
            self._flush(peer)

    def _flush(self, peer: "_Peer") -> None:
        try:
            while peer.due and (sent := peer.link.send_some([peer.due])):
                del peer.due[:sent]
                self.bytes_sent += sent
        except PeerLost:
            # It reads no more, but what it said before is still to be read. If that is
            # a goodbye, all is well; if not, `_read` finds the end.
            peer.due.clear()

    def _read(self, peer: "_Peer") -> None:
        if peer.due:
            self._flush(peer)
        try:
            while received := peer.link.recv_some(peer.buffer):
                for frame in peer.reader.feed(memoryview(peer.buffer)[:received]):
                    self._handle(peer, *frame)
        except PeerLost as lost:
            self._gone(peer, str(lost))
        except (FrameError, TypeError, KeyError, ValueError) as exc:
            self._gone(peer, f"it sent something that is no frame: {exc}")

    def _handle(self, peer: "_Peer", header: Header, content: Any) -> None:
        match header.kind:
            case Kind.BEAT:
                peer.last_beat, peer.entered = time.monotonic(), header.sequence
            case Kind.TABLE:
                self.table = [(host, port) for host, port in content]
                self._table_came.set()
            case Kind.ABORT if self.rank == 0 and content["kind"] != "silent":
                # Judged after the beats of all other ranks have been read.
                self._notes.append(("accuse", Accusation(**content)))
                peer.accused = True
            case Kind.ABORT:
                self._decide(Accusation(**content))
            case Kind.GOODBYE:
                self._part(header.root, header.sequence)
            case Kind.MAIL:
                host, port = content
                self.mailboxes[header.root] = host, port
                self.mail_came()
                if self.rank == 0:
                    self._send(Kind.MAIL, content, root=header.root)

    # ---- Leaving and failing ----

    def _part(self, rank: int, sequence: int) -> None:
        """A rank has closed its group. Fine, unless a collective still needs it."""
        self.departed[rank] = sequence
        if self.rank == 0:
            self._send(Kind.GOODBYE, root=rank, sequence=sequence)
        if self.entered > sequence:
            self._report(Accusation("lost", self.rank, rank, self.why_gone(rank)))

    def why_gone(self, rank: int) -> str:
        return (
            f"rank {rank} closed its group after {self.departed[rank]} collectives, "
            "but others wait for it, in a collective or for a message. All ranks must "
            "make the same calls."
        )

    def _gone(self, peer: "_Peer", why: str) -> None:
        """The link to this peer is of no more use."""
        self._peers.pop(peer.rank, None)
        peer.link.close()
        if peer.rank not in self.departed and not peer.accused:
            text = (
                f"rank {self.rank} lost rank {peer.rank} ({peer.link.address}): {why}. "
                f"Rank {peer.rank} probably crashed or was killed: read its log first."
            )
            # Judged once all have been read, and first: who loses a neighbour closes
            # its own links, so another link that closed may be a consequence of this.
            accusation = Accusation("lost", self.rank, peer.rank, text)
            self._notes.appendleft(("accuse", accusation))

    def _report(self, accusation: Accusation) -> None:
        """Bring an accusation before the judge, who is rank 0."""
        if self.verdict:
            return
        if accusation.kind == "lost" and not accusation.confession:
            accusation = self._after_goodbyes(accusation)
        if self.rank != 0 and 0 in self._peers and 0 not in self.departed:
            self._send(Kind.ABORT, asdict(accusation))
        elif self.rank == 0 and accusation.kind == "mismatch":
            # The other side of it is on its way, and only both tell who is the odd one.
            self._mismatches.append(accusation)
            self._judge_at = time.monotonic() + MISMATCH_SECONDS
        elif self.rank == 0 and accusation.kind == "timeout":
            self._decide(self._judge_timeout(accusation))
        else:
            self._decide(accusation)

    def _after_goodbyes(self, accusation: Accusation) -> Accusation:
        """A link that closed after a goodbye is no crash: it is a call too many."""
        early = [r for r, last in self.departed.items() if last < self.entered]
        if accusation.culprit in self.departed:
            early = [accusation.culprit]
        if not early:
            return accusation
        return replace(accusation, culprit=early[0], text=self.why_gone(early[0]))

    def _judge_timeout(self, accusation: Accusation) -> Accusation:
        if self.table is None:
            return who_did_not_come(accusation, self.world_size, [0, *self._peers])
        # If rank 0 itself was stopped, its thread had not run for as long.
        pulses = {0: Pulse(self._gap, self.entered)}
        for peer in self._peers.values():
            pulses[peer.rank] = Pulse(peer.silence(), peer.entered)
        return who_is_missing(accusation, pulses, self.beat_seconds)

    def _decide(self, verdict: Accusation) -> None:
        """The first verdict is final: tell everyone, then wake this rank."""
        if self.verdict:
            return
        self.verdict = verdict
        if self.rank == 0:
            self._send(Kind.ABORT, asdict(verdict))
        self._alarm.sound(verdict.as_error(self.rank))
        self._judged.set()
        self._table_came.set()

    def _choose(self, mine: Accusation, error: PeerError) -> PeerError:
        """The verdict, or my own account of the same loss, which has the details."""
        verdict = self.verdict
        if verdict is None:
            self._failed = True  # so that leaving now is no goodbye
            if not self._silent(0):
                return error
            text = "rank 0 is not responding. Is it stopped, or its host cut off?"
            silent = replace(mine, kind="silent", culprit=0, text=f"{text} {mine.text}")
            self._post("tell", silent)  # it will hear it once it goes on
            return silent.as_error(self.rank)
        same = (verdict.kind, verdict.culprit) == ("lost", mine.culprit)
        explained = verdict.confession or mine.culprit in self.departed
        return error if same and not explained else verdict.as_error(self.rank)

    def _silent(self, rank: int) -> bool:
        peer = self._peers.get(rank)
        return peer is not None and peer.silence() > 2 * self.beat_seconds


class _Peer:
    """What a control thread knows of the rank at the other end of a link."""

    def __init__(self, rank: int, link: Link):
        self.rank, self.link = rank, link
        self.reader, self.due = FrameReader(), bytearray()
        self.buffer = bytearray(READ_BYTES)
        self.last_beat, self.entered = time.monotonic(), 0
        self.accused = False  # it has said why it fails; its end needs no other reason

    def silence(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.last_beat
