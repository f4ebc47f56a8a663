"""PowerSGD: a gradient matrix as the product of two thin ones.

    M (a x b)                         P (a x r)     Q (b x r), r = 1 or a few
    . . . . . .                       .
    . . . . . .        is nearly      .   times     . . . . . .  (Q transposed)
    . . . . . .                       .
    a b numbers                       (a + b) r numbers on the wire

One step of power iteration, with an all-reduce after each of its two products:

    1.  M = gradient + error of the last step          this rank's own
    2.  P = M Q                        average over ranks, then make P orthonormal
    3.  Q = transposed M times P       average over ranks
    4.  average of M is nearly P times transposed Q    the same on all ranks
    5.  error = M - that                               what was not sent, for next time

Why it works.  The product is linear, so averaging P averages M Q. What rank r cannot
express is not lost but *fed back*: it is in M again in the next step, and is sent when
it has grown. And Q is kept ("warm start"), so that the iteration goes on from step to
step and finds the direction in which gradients are large.

Rule 1.  It starts after some steps of plain averages: early gradients are large and
         turn quickly, and the buckets are rebuilt after the first backward.
Rule 2.  A matrix is compressed only if that makes it smaller by `min_compression_rate`;
         all else (biases) is averaged as it is.

Worked example.  A 512 x 784 matrix of float32 has 1,605,632 bytes; P and Q at rank 1
have 1,296 numbers, 5,184 bytes: 310 times fewer.
        [Vogels, Karimireddy & Jaggi 2019, arXiv 1905.13727]

In PyTorch: ddp_comm_hooks/powerSGD_hook.py, whose names these are.

Left out: batching matrices of one shape; ranks on unlike processors: step 4 is computed
on each, and another rounding there is a drift (`check_sync` would name it).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minddp.buckets import Bucket
from minddp.comm_hooks import allreduce_hook
from minddp.device import Array
from minddp.errors import UsageError
from minddp.group import ProcessGroup
from minddp.work import After, Work


class PowerSGDState:
    """What the hook remembers from step to step; the settings as in PyTorch.

    matrix_approximation_rank: r (not a process's rank); a higher one keeps more of the
    gradient and sends more bytes.
    start_powerSGD_iter: the first step that is compressed, 2 or more.
    use_error_feedback, warm_start: as above; without them it is rarely worth it.
    seed: of the first Q, the same on all ranks.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 10,
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        seed: int = 0,
    ):
        if start_powerSGD_iter < 2:
            raise UsageError(
                f"start_powerSGD_iter={start_powerSGD_iter}: the buckets are rebuilt "
                "after the first step, so it can start with the second at the earliest"
            )
        if matrix_approximation_rank < 1:
            raise UsageError("PowerSGD: matrix_approximation_rank is 1 or more")
        self.process_group = process_group
        self.rank = matrix_approximation_rank
        self.start, self.min_rate = start_powerSGD_iter, min_compression_rate
        self.use_error_feedback, self.warm_start = use_error_feedback, warm_start
        self.iteration = 0
        self.errors: dict[int, Array] = {}  # by the index of the bucket
        self.qs: dict[int, list[Array]] = {}
        self._draw = np.random.default_rng(seed)
        self._before = self._after = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, numbers before, numbers after) of all steps that were compressed."""
        return self._before / max(1, self._after), self._before, self._after

    def worth_it(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape is compressed."""
        if len(shape) < 2:
            return False
        a, b = shape[0], int(np.prod(shape[1:]))
        return a * b > (a + b) * min(self.rank, a, b) * self.min_rate

    def first_q(self, bucket: Bucket, matrices: list[Array]) -> list[Array]:
        """The Q of each matrix: that of the last step, or random and orthonormal."""
        if bucket.index not in self.qs or not self.warm_start:
            self.qs[bucket.index] = [
                orthonormal(self._draw.standard_normal((b, min(self.rank, a, b))))
                for a, b in (m.shape for m in matrices)
            ]
        return self.qs[bucket.index]

    def count(self, before: int, after: int) -> None:
        self._before, self._after = self._before + before, self._after + after


def powerSGD_hook(state: PowerSGDState, bucket: Bucket) -> Work | After:
    """The average of this bucket, its matrices to rank r."""
    pg, index = state.process_group, bucket.index
    state.iteration += index == 0
    if state.iteration < state.start:
        return allreduce_hook(pg, bucket)
    if state.use_error_feedback:
        bucket.flat += state.errors.setdefault(index, np.zeros_like(bucket.flat))
    matrices = [v.reshape(len(v), -1) for v in bucket.views if state.worth_it(v.shape)]
    others = [view for view in bucket.views if not state.worth_it(view.shape)]

    dtype = np.result_type(bucket.flat.dtype, np.float32)  # float16 has no QR
    qs = state.first_q(bucket, matrices)
    all_ps, ps = side_by_side(
        [(len(m), q.shape[1]) for m, q in each(matrices, qs)], dtype
    )
    all_qs, new_qs = side_by_side([q.shape for q in qs], dtype)
    rest, views = side_by_side([view.shape for view in others], bucket.flat.dtype)
    for m, q, p in each(matrices, qs, ps):
        np.matmul(m, q, out=p, casting="same_kind")
    for view, other in each(views, others):
        view[...] = other
    state.count(bucket.flat.size, all_ps.size + all_qs.size + rest.size)
    work_of_rest = pg.all_reduce(rest, "avg", async_op=True, bucket=index)
    work_of_ps = pg.all_reduce(all_ps, "avg", async_op=True, bucket=index)

    def decompress() -> None:
        for m, p, q in each(matrices, ps, new_qs):
            p[...] = orthonormal(p)
            np.matmul(m.T, p, out=q)
        pg.all_reduce(all_qs, "avg", bucket=index)
        if state.use_error_feedback:
            state.errors[index][...] = bucket.flat
        for m, p, q in each(matrices, ps, new_qs):
            m[...] = p @ q.T
        work_of_rest.wait()
        for view, other in each(views, others):
            other[...] = view
        if not np.isfinite(bucket.flat).all():  # this step is lost; keep the next clean
            state.errors.pop(index, None)
            return
        if state.use_error_feedback:
            state.errors[index] -= bucket.flat
        state.qs[index] = new_qs

    return After(work_of_ps, decompress)


def orthonormal(p: Array) -> Array:
    """Columns of the same span, at right angles and of length 1."""
    return np.linalg.qr(p)[0]


def side_by_side(
    shapes: Sequence[tuple[int, ...]], dtype: Any
) -> tuple[Array, list[Array]]:
    """One flat array, and views into it of these shapes, one after the other."""
    ends = np.cumsum([0, *(np.prod(shape, dtype=int) for shape in shapes)]).tolist()
    flat = np.zeros(ends[-1], dtype)
    parts = zip(shapes, ends, ends[1:], strict=False)
    return flat, [flat[start:end].reshape(shape) for shape, start, end in parts]


def each(*lists: list[Array]) -> Iterator[tuple[Array, ...]]:
    return zip(*lists, strict=True)
