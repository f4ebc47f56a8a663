"""What a ring can reach: the raw stream of its links, and a model of two numbers.

The raw stream is what an all-reduce moves, with nothing else: each rank sends as many
bytes to the right as come from the left, from memory as large as they are and into as
much, without a header, a segment or a sum. No all-reduce that moves as many bytes over
these links can be faster.

    rank r-1  ===bytes===>  rank r  ===bytes===>  rank r+1        both at once

The model says that a step costs alpha seconds before its first byte, and each byte 1/B:

    T = steps * alpha + bytes / B

    all-reduce of S bytes, n ranks     steps        bytes
    whole, if small                      n-1        (n-1)   * S
    in chunks                          2 (n-1)    2 (n-1)/n * S

steps and bytes are asked of ring.py for each size (`arrivals`), so the prediction knows
of every algorithm that runs there.

Worked example.  alpha = 25 us, B = 1 GB/s, n = 4. 1 KiB goes whole: 3 * 25 + 3.1 = 78
us, nearly all of it latency. 25 MiB go in chunks: 6 * 25 + 39,322 = 39,472 us, nearly
all of it bandwidth. In chunks, both are equal at 100 KB.

alpha and B are fitted to the measured times, by least squares on the relative error.
Absolute errors would let the largest array decide alone. Two other guesses are worse:
alpha from the smallest size has the noise of one number, and B from a stream leaves out
adding, on a fast link half the work. A size that is far off the fit then says that the
two numbers do not tell all: caches end there, or an algorithm.

In PyTorch: nothing; NCCL's tuning.cc has such a latency and bandwidth for each of its
algorithms, to choose among them. iperf3 is a stream.

Left out: costs of adding, gamma, as a number of its own (they are in B); trees.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from minddp.bench_clock import Row
from minddp.errors import PeerTimeout
from minddp.frame import Header, Kind
from minddp.group import ProcessGroup
from minddp.net import Deadline
from minddp.ring import Links, arrivals


def steps_of_all_reduce(count: int, r: int, n: int) -> list[int]:
    """The bytes that come to rank r in each step, for `count` float32 elements."""
    what = "all_reduce", "sum", "float32", 0, -1, count, 4 * count
    return arrivals(Header(Kind.DATA, 1, *what), r, n)


# ---- The stream ----


def raw_stream(pg: ProcessGroup, count: int) -> Callable[[], None]:
    """A call, to be made by all ranks, that moves the bytes of an all-reduce.

    It uses the ring's own links. They stay in step, as every rank takes from the left
    exactly what left gives, and nothing else is under way.
    """
    links, r, n = pg.ring_links, pg.rank, pg.world_size
    assert links, "a world of one has no links"
    outgoing = sum(steps_of_all_reduce(count, (r + 1) % n, n))
    incoming = sum(steps_of_all_reduce(count, r, n))
    # Written to, since memory that nobody has written to is one page of zeros.
    out, into = (np.ones(nbytes, np.uint8).data for nbytes in (outgoing, incoming))
    return lambda: stream(links, out, into, Deadline(pg.timeout))


def stream(links: Links, out: memoryview, into: memoryview, deadline: Deadline) -> None:
    """Send `out` to the right while `into` is filled from the left.

    Raises: PeerError.
    """
    while out or into:
        sent = links.send_some([out]) if out else 0
        received = links.recv_some(into) if into else 0
        out, into = out[sent:], into[received:]
        if sent or received:
            deadline.restart()
        elif not links.wait(bool(out), bool(into), deadline):
            text = f"the raw stream stood still for {deadline.seconds:g} s"
            raise PeerTimeout(text, links.left.peer)


# ---- The model ----


class Model(NamedTuple):
    """T = steps * alpha + bytes / bandwidth, in seconds and bytes."""

    alpha: float
    seconds_per_byte: float

    def seconds(self, steps: float, nbytes: float) -> float:
        return steps * self.alpha + nbytes * self.seconds_per_byte

    def __str__(self) -> str:
        rate = self.seconds_per_byte and 1e-9 / self.seconds_per_byte
        return f"steps * {self.alpha * 1e6:.1f} us + bytes / {rate:.2f} GB/s"


def fit(
    steps: Sequence[int], nbytes: Sequence[int], seconds: Sequence[float]
) -> Model | None:
    """The model nearest to these times; None if all are of one size, and tell one
    number only.

    Neither number is negative: where the best fit has one below zero, it is 0, and the
    other is fitted alone.
    """
    if len(set(nbytes)) < 2:
        return None
    columns = np.array([steps, nbytes]) / np.array(seconds)  # times (alpha, 1/B): ones
    both = np.linalg.lstsq(columns.T, np.ones(len(seconds)), rcond=None)[0]
    if (both >= 0).all():
        return Model(*both.tolist())
    alone = columns.sum(1) / (columns**2).sum(1)
    keep = int(np.argmax(both))
    return Model(*np.where(np.arange(2) == keep, alone, 0.0).tolist())


def predict(rows: Sequence[Row]) -> Model | None:
    """Add `predicted_us` to the rows of one all-reduce over TCP; None if there is
    nothing to fit."""
    if any((row["op"], row["transport"]) != ("all_reduce", "tcp") for row in rows):
        return None
    traffic = [
        steps_of_all_reduce(row["bytes"] // 4, 0, row["world_size"]) for row in rows
    ]
    steps, nbytes = [len(each) for each in traffic], [sum(each) for each in traffic]
    model = fit(steps, nbytes, [row["median_us"] / 1e6 for row in rows])
    if model:
        for row, s, b in zip(rows, steps, nbytes, strict=True):
            row["predicted_us"] = round(model.seconds(s, b) * 1e6, 1)
    return model
