"""`minddp bench all-reduce` and the other collectives: time and bandwidth by size.

    algbw = bytes / time                  what the caller sees
    busbw = algbw * factor                what a link carries; comparable for any n

    op                                                      factor
    all_reduce                                              2 (n-1)/n
    reduce_scatter all_gather gather scatter all_to_all     (n-1)/n
    broadcast reduce send                                   1

bytes: the whole array, with the chunks of all ranks. The factors are those of
nccl-tests: what an ideal algorithm must move. Where ours moves more, busbw is so much
lower: an all_to_all along the ring (rooted.py), and an all_reduce of more than two
ranks that is small enough to go whole (ring.py). With one rank nothing moves, and busbw
is 0.

Every array is filled so that each element tells rank and position, and sums stay whole
numbers below 2**24, which float32 has exactly:

    x[i] = 128 * rank + i % 127      n = 2:  rank 0:    0   1   2 ...  126    0 ...
                                             rank 1:  128 129 130 ...  254  128 ...
                                             sum:     128 130 132 ...  380  128 ...

127 is prime: no two chunks of a power of two begin alike. An array of ones would be
right in any order.

An all-reduce is of an array that the group has made (`ProcessGroup.zeros`), as DDP's
buckets are. In shared memory that is reduced where it lies; one that comes from
elsewhere is copied in and out, which `plain_us` tells.

Rule.  A round took what it took the ranks on average, as in nccl-tests: by one rank's
       clock it would seem short whenever that rank leaves the barrier last. With a
       root, and in messages, it is what the slowest rank took: others are through once
       they have sent.

In PyTorch: param_bench's comms tests; nccl-tests, whose PERFORMANCE.md explains busbw.

Left out: other dtypes; several collectives at once.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from minddp.bench_clock import Row, Trial, median, network, take_turns
from minddp.bench_gloo import gloo_all_reduce
from minddp.bench_limits import raw_stream
from minddp.errors import MindDPError
from minddp.group import ProcessGroup
from minddp.progress import progress
from minddp.ring import chunk, segments

Array = np.ndarray[Any, Any]

WARM_UP = 3  # rounds that do not count
POSITIONS, RANK_STEP = 127, 128  # positions fit below the step of a rank


class Expected(NamedTuple):
    """x[where] is, in the end, scale * positions[source] + base."""

    where: slice
    source: slice
    scale: int
    base: int


class Collective(NamedTuple):
    """How it is called, what it leaves, and what that is worth."""

    factor: Callable[[int], float]  # n -> busbw / algbw
    call: Callable[[ProcessGroup, Array], object]
    leaves: Callable[[int, int, int], Sequence[Expected]]  # rank, n, elements
    slowest: bool = False  # whether the slowest rank's time counts, or the mean
    arrays: int = 1  # that a rank holds, one after the other


# ---- What each of them leaves on rank r of n, in an array of c elements ----


def own(r: int, n: int, c: int) -> list[Expected]:
    """What was there before."""
    return [Expected(slice(0, c), slice(0, c), 1, RANK_STEP * r)]


def total(r: int, n: int, c: int) -> list[Expected]:
    return [Expected(slice(0, c), slice(0, c), n, RANK_STEP * n * (n - 1) // 2)]


def chunk_of_total(r: int, n: int, c: int) -> list[Expected]:
    mine = chunk(c, n, r)
    return [each._replace(where=mine, source=mine) for each in total(r, n, c)]


def chunks_of_all(r: int, n: int, c: int) -> list[Expected]:
    return [
        Expected(chunk(c, n, k), chunk(c, n, k), 1, RANK_STEP * k) for k in range(n)
    ]


def chunk_of_root(r: int, n: int, c: int) -> list[Expected]:
    return [Expected(chunk(c, n, r), chunk(c, n, r), 1, 0)]


def exchanged(r: int, n: int, c: int) -> list[Expected]:
    return [
        Expected(chunk(c, n, k), chunk(c, n, r), 1, RANK_STEP * k) for k in range(n)
    ]


def from_left(r: int, n: int, c: int) -> list[Expected]:
    """Two arrays: this rank's own, and its left neighbour's."""
    theirs = RANK_STEP * ((r - 1) % n)
    return [*own(r, n, c), Expected(slice(c, 2 * c), slice(0, c), 1, theirs)]


def root_has(leaves: Callable[[int, int, int], list[Expected]]) -> Any:
    """These on rank 0; on the others, what was there before."""
    return lambda r, n, c: leaves(r, n, c) if r == 0 else own(r, n, c)


def send_to_right(pg: ProcessGroup, x: Array) -> None:
    """The first half of x to the right, while the second comes from the left."""
    out, into = np.split(x, 2)
    sent = pg.isend(out, (pg.rank + 1) % pg.world_size)
    pg.recv(into, (pg.rank - 1) % pg.world_size)
    sent.wait()


def once(n: int) -> float:
    return 1.0


def all_but_one(n: int) -> float:
    return (n - 1) / n


def twice(n: int) -> float:
    return 2 * (n - 1) / n


COLLECTIVES = {
    "all_reduce": Collective(twice, lambda pg, x: pg.all_reduce(x), total),
    "reduce_scatter": Collective(
        all_but_one, lambda pg, x: pg.reduce_scatter(x), chunk_of_total
    ),
    "all_gather": Collective(
        all_but_one, lambda pg, x: pg.all_gather(x), chunks_of_all
    ),
    "broadcast": Collective(
        once,
        lambda pg, x: pg.broadcast(x),
        lambda r, n, c: own(0, n, c),
        slowest=True,
    ),
    "reduce": Collective(
        once, lambda pg, x: pg.reduce(x), root_has(total), slowest=True
    ),
    "gather": Collective(
        all_but_one, lambda pg, x: pg.gather(x), root_has(chunks_of_all), slowest=True
    ),
    "scatter": Collective(
        all_but_one, lambda pg, x: pg.scatter(x), chunk_of_root, slowest=True
    ),
    "all_to_all": Collective(all_but_one, lambda pg, x: pg.all_to_all(x), exchanged),
    "send": Collective(once, send_to_right, from_left, slowest=True, arrays=2),
    "barrier": Collective(once, lambda pg, x: pg.barrier(), own),
}


# ---- Measuring ----


def elements(op: str, n: int, nbytes: int) -> int:
    """The float32 elements of an array: rounded up, for all_to_all to n equal
    chunks."""
    unit = n if op == "all_to_all" else 1
    return -(-nbytes // (4 * unit)) * unit


def repetitions(nbytes: int) -> int:
    """More for small arrays, within about 200 MB and between 5 and 300."""
    return max(5, min(300, int(2e8 / (nbytes + 100_000))))


def collective_rows(pg: ProcessGroup, options: argparse.Namespace) -> Iterator[Row]:
    """One row for each op and size; an all-reduce over TCP has the stream's time too,
    and the peer's if it is to be compared."""
    cases = [
        (op, nbytes)
        for op in options.ops
        for nbytes in (options.sizes if op != "barrier" else [0])
    ]
    peer = gloo_all_reduce(pg, options.store) if options.compare else nullcontext()
    alone = options.benchmark == "all-reduce"
    with peer as gloo:
        for op, nbytes in progress(cases, desc="sizes", show=pg.rank == 0):
            yield measure(pg, op, elements(op, pg.world_size, nbytes), alone, gloo)


def measure(
    pg: ProcessGroup,
    op: str,
    count: int,
    with_stream: bool = False,
    gloo: Callable[[Array], Callable[[], object]] | None = None,
) -> Row:
    """The row of one op on arrays of `count` float32. All ranks call it.

    with_stream: time what the links can carry too, if it is a ring over TCP.
    gloo: makes a call that all-reduces an array in place.
    """
    collective = COLLECTIVES[op]
    length = count * collective.arrays
    x = np.empty(length, np.float32) if op != "all_reduce" else pg.zeros(length)
    trials = {"": trial(pg, op, x, count, lambda: collective.call(pg, x))}
    if op == "all_reduce" and pg.transport != "tcp":
        plain = np.empty_like(x)
        trials["plain"] = trial(pg, op, plain, count, lambda: pg.all_reduce(plain))
    if with_stream and pg.transport == "tcp" and pg.world_size > 1:
        trials["stream"] = Trial(raw_stream(pg, count))
    if gloo:
        trials["gloo"] = trial(pg, "all_reduce", x, count, gloo(x))
    times = time_of_each(pg, op, trials, WARM_UP + repetitions(x.nbytes))
    row = result(pg, op, 4 * count, times.pop(""))
    for name, others in times.items():
        row |= beside(name, median(others), row["median_us"])
    return row


def time_of_each(
    pg: ProcessGroup, op: str, trials: dict[str, Trial], rounds: int
) -> dict[str, list[float]]:
    """The seconds of each trial, sorted, without the warm-up; on all ranks the same."""
    seconds = np.array(take_turns(pg, list(trials.values()), range(rounds)))
    of_ranks = pg.all_gather_rows(seconds[:, WARM_UP:])
    of_all = of_ranks.max(0) if COLLECTIVES[op].slowest else of_ranks.mean(0)
    return dict(zip(trials, np.sort(of_all).tolist(), strict=True))


def trial(
    pg: ProcessGroup, op: str, x: Array, count: int, run: Callable[[], object]
) -> Trial:
    """Fill x, run, and look at every element of what this rank is left with."""
    positions = np.resize(np.arange(POSITIONS, dtype=np.float32), count)
    expected = COLLECTIVES[op].leaves(pg.rank, pg.world_size, count)

    def fill() -> None:
        np.add(positions, RANK_STEP * pg.rank, out=x[:count])
        x[count:] = -1

    def check() -> None:
        for each in expected:
            check_elements(f"rank {pg.rank}: {op}", x, positions, each)

    return Trial(run, fill, check)


def check_elements(who: str, x: Array, positions: Array, expected: Expected) -> None:
    """Raises: MindDPError naming the first element that is wrong."""
    shift = expected.source.start - expected.where.start
    for piece in segments(expected.where, x.itemsize):
        source = slice(piece.start + shift, piece.stop + shift)
        right = expected.scale * positions[source] + expected.base
        wrong = np.flatnonzero(x[piece] != right)
        if wrong.size:
            i = int(wrong[0])
            raise MindDPError(
                f"{who} of {len(positions)} elements is wrong, so it has no time: "
                f"element {piece.start + i} is {x[piece][i]:g}, not {right[i]:g}"
            )


def result(pg: ProcessGroup, op: str, nbytes: int, seconds: Sequence[float]) -> Row:
    """One row: what `--json` prints; seconds: sorted."""
    n, algbw = pg.world_size, nbytes / median(seconds) / 1e9
    return {
        "op": op,
        "world_size": n,
        **network(pg),
        "bytes": nbytes,
        "median_us": round(median(seconds) * 1e6, 1),
        "min_us": round(seconds[0] * 1e6, 1),
        "algbw_GBps": round(algbw, 3),
        "busbw_GBps": round(algbw * COLLECTIVES[op].factor(n) if n > 1 else 0.0, 3),
    }


def beside(name: str, seconds: float, ours_us: float) -> Row:
    """What the row says of a stream (how much of it we reach) or of a peer (how many
    times as long it takes)."""
    us = round(seconds * 1e6, 1)
    ratio = {"stream": "of_stream"}.get(name, f"{name}_ratio")
    return {f"{name}_us": us, ratio: round(us / ours_us, 3)}
