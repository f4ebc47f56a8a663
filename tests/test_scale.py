"""Sixteen and thirty-two ranks, as threads with real links: many more than cores."""

import numpy as np
import pytest

import minddp
from minddp import net, nn
from minddp.ring import STEP_BYTES, chunk
from minddp.testing import run_groups


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("n", [16, 32])
def test_many_ranks_get_every_collective_right(n, transport):
    """100 rank + position tells where each element came from."""
    total = lambda length: n * np.arange(length) + 100.0 * n * (n - 1) / 2  # noqa: E731
    small, large = 7, STEP_BYTES // 8 * 3 + 5  # fewer elements than ranks; many more

    def body(pg):
        mine = lambda length: 100.0 * pg.rank + np.arange(length)  # noqa: E731
        for length in small, large:
            x = mine(length)
            pg.all_reduce(x)
            assert x.tolist() == total(length).tolist()
            part = chunk(length, n, pg.rank)
            assert pg.reduce_scatter(mine(length)).tolist() == (
                total(length)[part].tolist()
            )
            for root in 0, n - 1:
                x = mine(length)
                pg.reduce(x, root)
                expected = total(length) if pg.rank == root else mine(length)
                assert x.tolist() == expected.tolist()
                pg.broadcast(x, root)
                assert x.tolist() == total(length).tolist()
        table = pg.all_gather_rows(pg.rank)
        assert table.tolist() == list(range(n))
        x = 1000.0 * pg.rank + np.arange(n)
        pg.all_to_all(x)
        assert x.tolist() == [1000.0 * k + pg.rank for k in range(n)]
        pg.scatter(x, root=5)
        assert x[pg.rank] == 1000.0 * pg.rank + 5
        pg.gather(x, root=5)
        if pg.rank == 5:
            assert x.tolist() == [1000.0 * k + 5 for k in range(n)]
        pg.barrier()
        return pg.transport

    assert run_groups(n, body, timeout=20.0, transport=transport) == [transport] * n


def test_sixteen_replicas_train_alike():
    def body(pg):
        minddp.manual_seed(pg.rank)
        ddp = minddp.DistributedDataParallel(nn.Linear(5, 3), pg)
        optimizer = minddp.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x = np.random.default_rng(pg.rank).standard_normal((4, 5), np.float32)
            (ddp(x) ** 2).mean().backward()
            optimizer.step()
        return b"".join(p.data.tobytes() for p in ddp.parameters())

    assert len(set(run_groups(16, body, timeout=20.0))) == 1


def test_a_rendezvous_makes_as_many_links_as_a_star_and_a_ring_have(monkeypatch):
    """4 n - 2 ends: of n-1 control links and n ring links. All pairs would be n^2."""
    made = []
    original = net.Link.__init__

    def counted(self, *arguments):
        made.append(self)
        original(self, *arguments)

    monkeypatch.setattr(net.Link, "__init__", counted)
    for n in 4, 8, 16:
        made.clear()
        run_groups(n, lambda pg: None, timeout=20.0)
        assert len(made) == 2 * (n - 1) + 2 * n


def test_rank_0_sends_little_more_than_the_table_to_each_rank():
    def body(pg):
        return pg.stats()["control_bytes_sent"]

    for n in 4, 16:
        of_zero, *of_others = run_groups(n, body, timeout=20.0)
        table_of_n = of_zero / (n - 1)
        assert table_of_n < 60 + 40 * n, "the table, and nothing else, to each"
        assert max(of_others) < 200
