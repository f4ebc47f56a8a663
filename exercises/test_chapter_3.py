"""Tests of the exercises of docs/03-the-ring.md."""

import numpy as np
import pytest

from minddp.frame import HEADER_BYTES, Header, Kind
from minddp.net import Deadline
from minddp.testing import run_ranks


def call(x, root=0):
    return Header(
        *(Kind.DATA, 1, "all_reduce", "sum", x.dtype.name),
        *(root, -1, x.size, x.nbytes),
    )


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_root(answer, n, length):
    """reduce_to_root leaves the sum on the root, and the others' arrays alone."""
    for root in range(n):

        def body(links, root=root):
            x = np.arange(length) + 1000.0 * links.rank
            answer(links, x, call(x, root), Deadline(5))
            return x.tolist(), links.bytes_sent

        for rank, (x, sent) in enumerate(run_ranks(n, body)):
            mine = [i + 1000.0 * rank for i in range(length)]
            total = [n * i + 1000.0 * n * (n - 1) / 2 for i in range(length)]
            assert x == (total if rank == root else mine)
            assert sent <= 8 * length + HEADER_BYTES


def test_swap(answer):
    """swap_all_reduce gives both ranks the bits of x0 + x1, in one exchange."""
    draw = np.random.default_rng(0)
    x0, x1 = draw.standard_normal((2, 501)).astype(np.float32)

    def body(links):
        x = (x0, x1)[links.rank].copy()
        answer(links, x, call(x), Deadline(5))
        return x.tobytes(), links.bytes_sent

    for bits, sent in run_ranks(2, body):
        assert bits == (x0 + x1).tobytes()
        assert x0.nbytes <= sent <= x0.nbytes + HEADER_BYTES
