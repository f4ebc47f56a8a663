"""Tests of the exercises of docs/04-ddp.md."""

import numpy as np

from minddp import Tensor, manual_seed, nn
from minddp import functional as F
from minddp.optim import SGD
from minddp.testing import run_groups


def model():
    manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5, dtype="float64"), nn.ReLU(), nn.Linear(5, 3, dtype="float64")
    )


def test_flat(answer):
    """average_flat averages all gradients with a single all-reduce."""

    def body(pg):
        parameters = list(model().parameters())
        for i, p in enumerate(parameters):
            p.grad = Tensor(np.full(p.shape, 10.0 * i + pg.rank))
        arrays = [p.grad.data for p in parameters]
        answer(parameters, pg)
        assert all(p.grad.data is a for p, a in zip(parameters, arrays, strict=True))
        return pg.stats()["collectives"], [a.ravel().tolist() for a in arrays]

    sizes = [p.numel() for p in model().parameters()]
    expected = [[10.0 * i + 1] * size for i, size in enumerate(sizes)]
    assert run_groups(3, body) == [(1, expected)] * 3


def test_local(answer):
    """average_parameters makes replicas equal that trained apart for a while."""

    def body(pg):
        m = model()
        optimizer = SGD(m.parameters(), lr=0.1)
        draw = np.random.default_rng(pg.rank)
        states = []
        for step in range(1, 11):
            optimizer.zero_grad()
            x, y = draw.standard_normal((8, 4)), draw.integers(0, 3, 8)
            F.cross_entropy(m(x), y).backward()
            optimizer.step()
            if step % 5 == 0:
                before = np.concatenate([p.data.ravel() for p in m.parameters()])
                answer(m.parameters(), pg)
                after = np.concatenate([p.data.ravel() for p in m.parameters()])
                states.append((before, after))
        return states

    for (a, mean_a), (b, mean_b) in zip(*run_groups(2, body), strict=True):
        assert a.tolist() != b.tolist()
        assert mean_a.tolist() == mean_b.tolist()
        assert np.allclose(mean_a, (a + b) / 2, atol=1e-15)
