"""The mailbox: messages from any rank to any other, in order, while both go on.

    rank 1  recv(x, src=3)                          rank 3  isend(y, dst=1)
       |                                               |
       |  opens a port                                 |  keeps the message
       |--- "dial me there" -----> rank 0 -----------> |
       | <---------- handshake, role MAIL ------------ |
       | <=== header | payload ======================= |

A ring link goes to a neighbour and belongs to collectives. For messages there is one
more link for each direction of each pair that speaks, made when it is first needed.
With its first message, sent or received, a rank opens a port and tells all others
where, by way of rank 0. Until then it does not listen, and others keep what they have
for it.

Rule 1.  Messages from one rank to another arrive in the order in which they were sent,
         and the k-th `send` there meets the k-th `recv` here. Both know what will come:
         a header that differs in count, dtype or tag is a PeerMismatch.
Rule 2.  Nothing is read before a `recv` waits for it, right into its array. So a
         message takes no memory on its way, and a fast sender waits for a slow
         receiver.
Rule 3.  One thread moves all bytes; it starts with the first message. `isend` never
         blocks, and a rank can compute, or be in a collective, meanwhile.

Invariant.  A message waits at most `timeout` seconds without a byte moving once it is
the first of its link; then the group fails, as with a collective.

In PyTorch: `ProcessGroupGloo::send` and `recv` over gloo's unbound buffers; its links
are there from the start, n (n-1) / 2 of them.

Left out: `recv` from whoever sends first; messages to oneself; a first message after
rank 0 has left, for it is rank 0 that tells where to dial.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from minddp.errors import PeerError, PeerLost, PeerMismatch, PeerTimeout, UsageError
from minddp.frame import HEADER_BYTES, FrameError, Header
from minddp.handshake import MAIL, Hello, Script, answer, introduce
from minddp.lobby import Lobby
from minddp.net import Alarm, Bytes, Deadline, Link, Listener
from minddp.ring import as_bytes, drop_sent, next_wanted
from minddp.work import Work

Array = np.ndarray[Any, Any]
Wants = Iterator[bytearray | memoryview]  # the memory to fill, one piece at a time

LINGER_SECONDS = 5.0  # how long a closing group waits for a message to move on
LOOK_SECONDS = 0.25  # how often to look whether the rank we wait for has left


class Line:
    """Messages between this rank and one other, in one direction, and their link."""

    def __init__(self, peer: int, sends: bool, timeout: float):
        self.peer, self.sends = peer, sends
        self.link: Link | None = None
        self.count = 0  # messages so far
        self.deadline = Deadline(timeout)
        self.bytes = 0  # that have moved
        self._waiting: deque[tuple[Work, Array]] = deque()  # the first is under way
        self._ready: deque[Bytes] = deque()  # of the message that is being sent
        self._script: Wants = iter(())  # of the one that is being received
        self._wanted = memoryview(b"")

    def add(self, work: Work, flat: Array) -> None:
        self._waiting.append((work, flat))
        if len(self._waiting) == 1:
            self._begin()

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def events(self) -> int:
        """What its link is to be watched for."""
        return select.POLLOUT if self.sends else select.POLLIN

    def move(self) -> None:
        """Send or receive what the kernel takes or has.

        Raises: PeerLost, PeerMismatch.
        """
        while self.link and self._waiting:
            if self.sends:
                moved = self.link.send_some(self._ready)
                drop_sent(self._ready, moved)
            else:
                moved = self.link.recv_some(self._wanted)
                self._wanted = self._wanted[moved:]
                if moved and not self._wanted:
                    self._wanted = next_wanted(self._script)
            if not moved:
                return
            self.bytes += moved
            self.deadline.restart()
            if not self._ready and not self._wanted:
                self._waiting.popleft()[0].run()
                self._begin()

    def fail(self, error: BaseException) -> None:
        while self._waiting:
            self._waiting.popleft()[0].end(error)

    def _begin(self) -> None:
        """Turn to the message that is first now."""
        self.deadline.restart()
        if not self._waiting:
            return
        work, flat = self._waiting[0]
        if self.sends:
            self._ready = deque([work.call.pack(), as_bytes(flat)])
        else:
            self._script = self._header_then(flat, work.call)
            self._wanted = next_wanted(self._script)

    def _header_then(self, flat: Array, call: Header) -> Wants:
        theirs = bytearray(HEADER_BYTES)
        yield theirs
        if theirs != call.pack():
            try:
                what = str(Header.unpack(bytes(theirs)))
            except FrameError as exc:
                what = f"something else ({exc})"
            raise PeerMismatch(
                f"rank {self.peer} sent {what}, where this rank waits for {call}. The "
                "k-th send must meet the k-th recv, with the same count, dtype and tag",
                self.peer,
            )
        yield as_bytes(flat)

    def __repr__(self) -> str:
        call = self._waiting[0][0].call if self._waiting else "nothing"
        return f"{call} {'to' if self.sends else 'from'} rank {self.peer}"


class Mailbox:
    """This rank's lines to and from others, and the thread that moves their bytes.

    listener: our port, which is open already. invitations: where others can be dialled,
    it grows. departed: ranks that have left. agree(error, where): fails the group, and
    gives the error that all ranks raise. wrap: what becomes of a link to send on.
    """

    def __init__(
        self,
        me: Hello,
        token: bytes,
        timeout: float,
        alarm: Alarm,
        *,
        listener: Listener,
        invitations: Mapping[int, tuple[str, int]],
        departed: Mapping[int, int],
        agree: Callable[[PeerError, str], BaseException],
        wrap: Callable[[Link], Link] = lambda link: link,
    ):
        self._me, self._token, self._timeout = me, token, timeout
        self._alarm, self._invitations = alarm, invitations
        self._departed, self._agree, self._wrap = departed, agree, wrap
        self._lobby = Lobby(listener, self._answer, alarm, timeout, me.world_size)
        self._lines: dict[tuple[int, bool], Line] = {}
        self._posted: deque[tuple[Line, Work, Array]] = deque()
        self._lock = threading.Lock()  # guards _posted and _error
        self._error: BaseException | None = None
        self._dialled: set[int] = set()
        self._leaving = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._guarded, name="minddp-mail")
        self._thread.daemon = True
        self._thread.start()

    # ---- What the group asks for ----

    def line(self, peer: int, sends: bool) -> Line:
        """The line to this rank, or from it."""
        key = peer, sends
        if key not in self._lines:
            self._lines[key] = Line(peer, sends, self._timeout)
        return self._lines[key]

    def post(self, line: Line, work: Work, flat: Array) -> None:
        """Send `flat`, or receive into it, as `work.call` says."""
        with self._lock:
            if self._error:
                work.end(self._error)
            else:
                self._posted.append((line, work, flat))
        self.wake()

    def wake(self) -> None:
        os.write(self._wake_write, b"!")

    def bytes_moved(self, sends: bool) -> int:
        """The bytes of messages, and of their headers, that went or came."""
        lines = list(self._lines.values())
        return sum(line.bytes for line in lines if line.sends is sends)

    def close(self) -> None:
        """Deliver what is on its way, drop all else, and end the thread."""
        self._leaving = True
        self.wake()
        self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Close all descriptors; also in a forked child, which has no such thread."""
        for line in self._lines.values():
            if line.link:
                line.link.close()
        self._lobby.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- The thread ----

    def _guarded(self) -> None:
        """Nobody is to wait for a thread that has died of a mistake of ours."""
        try:
            self._run()
        except PeerError as error:
            self._end_all(self._agree(error, "in a message"))
        except BaseException as error:
            self._end_all(error)
            raise

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._posted:
                    line, work, flat = self._posted.popleft()
                    line.add(work, flat)
            busy = [line for line in list(self._lines.values()) if line.busy]
            if self._leaving and not any(self._can_go(line) for line in busy):
                text = f"rank {self._me.rank} closed its group during {busy}"
                return self._end_all(UsageError(text))
            for line in busy:
                self._dial(line)
            self._wait(busy)
            if self._alarm.error:
                raise self._alarm.error
            for hello, link in self._lobby.advance():
                sends = hello is None
                self.line(link.peer, sends).link = self._wrap(link) if sends else link
            for line in busy:
                self._move(line)

    def _wait(self, busy: list[Line]) -> None:
        """Sleep until a byte can move, something was posted, or it is time to look."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._alarm, select.POLLIN)
        patience = [self._lobby.register(poll)]
        for line in busy:
            patience.append(min(line.deadline.left(), LOOK_SECONDS))
            if line.link:
                poll.register(line.link, line.events)
        ready = poll.poll(min(patience) * 1000 + 1)
        if any(fd == self._wake_read for fd, _ in ready):
            os.read(self._wake_read, 4096)

    def _can_go(self, line: Line) -> bool:
        """Whether a group that closes stays for it: somebody is there to take it."""
        known = line.link or line.peer in self._invitations
        lingered = line.deadline.seconds - line.deadline.left() > LINGER_SECONDS
        return bool(line.sends and known and not lingered)

    def _dial(self, line: Line) -> None:
        """Once we have something to send and know where. Others dial us."""
        where = self._invitations.get(line.peer)
        if line.sends and where and line.peer not in self._dialled:
            self._dialled.add(line.peer)
            self._lobby.dial(line.peer, *where, introduce(self._me, self._token))

    def _answer(self) -> Script:
        def objection(hello: Hello) -> str | None:
            if hello.role != MAIL or self.line(hello.rank, sends=False).link:
                return f"rank {hello.rank} has no link to make here"
            return None

        return answer(self._me, self._token, objection)

    def _move(self, line: Line) -> None:
        """Raises: PeerError, told in full."""
        p, what = line.peer, f"rank {self._me.rank}, {line}"
        try:
            line.move()
        except PeerLost as lost:
            text = f"{what}: {lost}. Rank {p} probably crashed or left too early."
            raise PeerLost(text, p) from lost.__cause__
        if line.busy and not line.link and p in self._departed:
            raise PeerLost(f"{what}: rank {p} has closed its group.", p)
        if line.busy and p not in self._invitations and 0 in self._departed:
            raise PeerLost(
                f"{what}: rank 0 has left, and only it could have told where rank {p} "
                "takes messages. Close the group on rank 0 last, or after a barrier.",
                0,
            )
        if line.busy and not line.deadline.left():
            call = "recv" if line.sends else "send"
            raise PeerTimeout(
                f"{what}: no byte moved for {self._timeout:g} s. Does rank {p} call "
                f"{call} as often?",
                p,
            )

    def _end_all(self, error: BaseException) -> None:
        """Every message ends with this error, also those that come too late."""
        with self._lock:
            self._error = error
            for _, work, _ in self._posted:
                work.end(error)
            self._posted.clear()
        for line in list(self._lines.values()):
            line.fail(error)
