"""Work: a collective that was asked for, and the thread that performs them in order.

    main thread    submit #1    submit #2    ... computes ...    #1.wait()
                       |            |                               ^
    comm thread        '-> #1 ------+-----> #2 ------>              '-- it has ended

Rule 1.  Collectives are performed in the order in which they were submitted, one at a
         time. Ranks that submit in the same order therefore meet in the same order.
Rule 2.  Whoever waits helps: `wait` performs what is pending before its Work, and that
         itself, unless the comm thread is at it. Waking a thread takes 0.1 to 0.5 ms,
         as long as a small all-reduce.
Rule 3.  A Work holds the arrays that it reads and writes: the caller may forget them.
Rule 4.  An error is kept and raised by `wait`. The group is dead then, so every Work
         behind it ends with the same error.

In PyTorch: `c10d::Work`, and the threads of ProcessGroupGloo, which has two: the order
there is that of the sequence numbers.

Left out: callbacks; `wait` with a timeout of its own (a collective has one already).
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from minddp.errors import PeerError, same_error
from minddp.frame import Header


class Work:
    """One collective; made by the process group, waited for by whoever wants it."""

    def __init__(self, call: Header, perform: Callable[[], None] = lambda: None):
        self.call = call
        self._perform: Callable[[], None] | None = perform
        self._under_way = threading.Lock()  # held until it has ended: a light Event
        self._under_way.acquire()
        self._error: BaseException | None = None
        self.queue: WorkQueue | None = None  # in which it waits for its turn
        self.busy_ns = 0  # how long it was under way here, waiting for others included

    def run(self) -> None:
        """Perform it in this thread. Never raises; `wait` does."""
        assert self._perform, f"{self.call} was performed before"
        start = time.perf_counter_ns()
        try:
            self._perform()
        except BaseException as error:
            self.end(error)
        else:
            self.busy_ns = time.perf_counter_ns() - start
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """It has ended, with this error if there is one."""
        self._error = error
        self._perform = None  # lets go of the arrays
        self._under_way.release()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
        return self._perform is None

    def exception(self) -> BaseException | None:
        """The error with which it ended; None while it goes on, or if it did well."""
        return self._error

    def wait(self) -> None:
        """Return when the result is in the caller's array.

        Raises: the error with which it ended.
        """
        if self.queue:
            self.queue.help(self)
        with self._under_way:
            pass
        error = self._error
        if isinstance(error, PeerError):
            raise same_error(error) from error.__cause__
        if error is not None:
            raise error

    def __repr__(self) -> str:
        state = "ended" if self.is_completed() else "under way"
        return f"<Work {self.call}, {'failed' if self._error else state}>"


class After:
    """A Work (None: nothing is under way), and what remains to be done with its result
    by whoever waits for it."""

    def __init__(self, work: Work | None, finish: Callable[[], None]):
        self._work = work
        self._finish: Callable[[], None] | None = finish

    @property
    def busy_ns(self) -> int:
        """How long the Work was under way."""
        return self._work.busy_ns if self._work else 0

    def wait(self) -> None:
        """As `Work.wait`; the first call finishes as well."""
        if self._work:
            self._work.wait()
        if self._finish:
            self._finish()
            self._finish = None


class WorkQueue:
    """Performs what is submitted, in order, in a thread that starts with the first."""

    def __init__(self) -> None:
        self._pending: deque[Work] = deque()  # the first is next, or under way
        self._turn = threading.Lock()  # whose holder performs the first
        self._performer: int | None = None  # the thread that holds it
        self._changed = threading.Condition()
        self._ending = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all that was submitted has ended."""
        return not self._pending

    def submit(self, work: Work) -> None:
        work.queue = self
        with self._changed:
            self._pending.append(work)
            self._changed.notify_all()
            if self._thread is None:
                name = "minddp-comm"
                self._thread = threading.Thread(target=self._run, name=name)
                self._thread.daemon = True
                self._thread.start()

    def close(self) -> None:
        """Perform what is pending, then end the thread.

        In a signal handler that has come between what its own thread performs, there is
        no waiting for that.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread and self._performer != threading.get_ident():
            self._thread.join()

    def help(self, work: Work) -> None:
        """Perform, in this thread, what is pending up to this work."""
        while not work.is_completed():
            self._perform_first()

    def _run(self) -> None:
        while self._wait_for_work():
            self._perform_first()

    def _wait_for_work(self) -> bool:
        """False once there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._ending)
            return bool(self._pending)

    def _perform_first(self) -> None:
        with self._turn:
            self._performer = threading.get_ident()
            try:
                if self._pending:
                    self._pending[0].run()
                    self._pending.popleft()
            finally:
                self._performer = None
