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


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_scan(answer, n, length):
    """scan leaves the sum of ranks 0 to r on rank r, and nobody sends more than x."""

    def body(links):
        x = np.arange(length) + 1000.0 * links.rank
        answer(links, x, call(x), Deadline(5))
        return x.tolist(), links.bytes_sent

    for r, (x, sent) in enumerate(run_ranks(n, body)):
        assert x == [(r + 1) * i + 1000.0 * r * (r + 1) / 2 for i in range(length)]
        assert sent <= (8 * length if r < n - 1 else 0) + HEADER_BYTES
