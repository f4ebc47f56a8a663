"""Ranks with different numbers of batches, and batches of different lengths."""

import warnings

import numpy as np
import pytest

from minddp import functional as F
from minddp import manual_seed, nn, optim
from minddp.data import DataLoader, DistributedSampler, TensorDataset
from minddp.ddp import DistributedDataParallel
from minddp.errors import UsageError
from minddp.testing import run_groups

DTYPE = "float64"
ONE = np.array([[1.0]])


def linear():
    m = nn.Linear(1, 1, bias=False, dtype=DTYPE)
    m.weight.data[...] = 0.0
    return m


def mlp():
    manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4, dtype=DTYPE), nn.Tanh(), nn.Linear(4, 2, dtype=DTYPE)
    )


def weights(m):
    return np.concatenate([p.data.ravel() for p in m.parameters()])


# ---- Different numbers of batches ----


@pytest.mark.parametrize("by_initial", [True, False])
def test_the_average_is_over_all_ranks_or_over_those_with_data(by_initial):
    """Rank r has r + 1 batches, whose gradients are r + 1, and steps of lr 1."""

    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        seen = []
        with ddp.join(divide_by_initial_world_size=by_initial):
            for _ in range(pg.rank + 1):
                m.zero_grad()
                ddp(ONE * (pg.rank + 1)).sum().backward()
                seen.append(m.weight.grad.item())
                m.weight.data -= m.weight.grad.data
        return seen, m.weight.item()

    # Batch 1: (1 + 2 + 3) / 3. Batch 2: 2 + 3, batch 3: 3, over 3 or over 2 and 1.
    second, third = (5 / 3, 3 / 3) if by_initial else (5 / 2, 3.0)
    averages = [2.0, second, third]
    for rank, (seen, weight) in enumerate(run_groups(3, body)):
        np.testing.assert_allclose(seen, averages[: rank + 1], rtol=1e-15)
        np.testing.assert_allclose(weight, -sum(averages), rtol=1e-15)


@pytest.mark.parametrize("has_none", [0, 1, 2])
def test_a_rank_without_any_batch_follows_the_others_from_the_first_one(has_none):
    """Also through the rebuild of the buckets, whose order it does not know."""

    def body(pg):
        m = mlp()
        ddp = DistributedDataParallel(m, pg, bucket_cap_mb=1e-6)
        optimizer = optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        with ddp.join():
            for _ in range(0 if pg.rank == has_none else 5):
                optimizer.zero_grad()
                ddp(np.full((2, 3), pg.rank + 1.0)).sum().backward()
                optimizer.step()
        return weights(m).tobytes(), ddp.describe()

    results = run_groups(3, body)
    assert len(set(results)) == 1
    assert results[0][0] != weights(mlp()).tobytes(), "it did train"


def test_join_ends_at_once_where_nobody_has_data_and_can_be_entered_again():
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        for _ in range(3):
            with ddp.join():
                pass
        with ddp.join():
            ddp(ONE).sum().backward()
        ddp(ONE).sum().backward()  # afterwards there is no roll call
        return m.weight.grad.item()

    assert run_groups(2, body) == [2.0, 2.0]


def test_without_it_the_optimizer_of_an_early_rank_stays_behind_and_then_mends_it():
    def momenta(pg, with_step):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        optimizer = optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        with ddp.join(then=optimizer.step if with_step else None):
            for _ in range(4 + 2 * pg.rank):
                optimizer.zero_grad()
                ddp(ONE * (pg.rank + 1)).sum().backward()
                optimizer.step()
        [state] = optimizer.state.values()
        return m.weight.item(), state["momentum_buffer"].item()

    (w0, v0), (w1, v1) = run_groups(2, lambda pg: momenta(pg, False))
    assert w0 == w1
    assert v0 != v1
    assert len(set(run_groups(2, lambda pg: momenta(pg, True)))) == 1


def test_two_forwards_before_one_backward_count_as_one_step():
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        with ddp.join():
            for _ in range(1 + pg.rank):
                m.zero_grad()
                (ddp(ONE) + ddp(ONE)).sum().backward()
        return m.weight.grad.item()

    assert run_groups(2, body) == [1.0, 1.0]  # in the last step, 2 / 2


def test_micro_batches_under_no_sync_need_no_answer():
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(1 + pg.rank):
                m.zero_grad()
                with ddp.no_sync():
                    ddp(ONE).sum().backward()
                ddp(ONE).sum().backward()
        return m.weight.grad.item()

    assert run_groups(3, body) == [2.0] * 3


def test_buffers_come_from_a_rank_that_still_has_data():
    class Counting(nn.Module):
        def __init__(self):
            self.layer = linear()
            self.register_buffer("calls", np.zeros(1))

        def forward(self, x):
            self.calls.data += 1
            return self.layer(x)

    def body(pg):
        m = Counting()
        ddp = DistributedDataParallel(m, pg)
        with ddp.join():
            for _ in range(2 + 3 * pg.rank):
                ddp(ONE).sum().backward()
        return m.calls.item()

    assert run_groups(3, body) == [8.0] * 3


def test_parameters_unused_in_the_steps_of_the_last_rank_stay_untouched():
    class Either(nn.Module):
        def __init__(self):
            self.a, self.b = linear(), linear()

        def forward(self, x, use):
            return getattr(self, use)(x)

    def body(pg):
        m = Either()
        ddp = DistributedDataParallel(m, pg, find_unused_parameters=True)
        with ddp.join():
            for step in range(1 + pg.rank):
                m.zero_grad()
                ddp(ONE, "ab"[step]).sum().backward()
        return m.a.weight.grad, m.b.weight.grad.item()

    assert run_groups(2, body) == [(None, 0.5)] * 2


def test_throw_on_early_termination_raises_on_all_ranks_and_the_group_lives_on():
    def body(pg):
        ddp = DistributedDataParallel(linear(), pg)
        with (
            pytest.raises(UsageError, match=r"ranks \[0, 1\] have no more data"),
            ddp.join(throw_on_early_termination=True),
        ):
            for _ in range(2 + (pg.rank == 2)):
                ddp(ONE).sum().backward()
        pg.barrier()

    run_groups(3, body)


def test_an_error_in_the_block_is_raised_and_not_waited_for():
    def body(pg):
        ddp = DistributedDataParallel(linear(), pg)
        with pytest.raises(KeyError), ddp.join():
            raise KeyError("the user's own")
        return ddp.reducer.roll_call

    assert run_groups(2, body) == [None, None]


def test_what_a_rank_counted_for_inside_is_forgotten_outside():
    """Alone in its last step, rank 1 counts for both; the next average is plain."""

    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg)
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(1 + pg.rank):
                ddp(ONE).sum().backward()
        m.zero_grad()
        ddp(ONE * (pg.rank + 1)).sum().backward()
        return m.weight.grad.item()

    assert run_groups(2, body) == [1.5, 1.5]


def test_join_that_is_not_enabled_does_nothing():
    def body(pg):
        ddp = DistributedDataParallel(linear(), pg)
        before = pg.stats()["collectives"]
        with ddp.join(enable=False):
            pass
        return pg.stats()["collectives"] - before

    assert run_groups(2, body) == [0, 0]


def test_the_comparison_of_replicas_waits_until_all_have_data():
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg, check_sync_every=2)
        with ddp.join():
            for _ in range(3 + 4 * pg.rank):
                m.zero_grad()
                ddp(ONE).sum().backward()
                m.weight.data -= m.weight.grad.data
        return m.weight.item()

    first, second = run_groups(2, body)
    assert first == second


# ---- Batches of different lengths ----


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_weighted_by_batch_every_step_is_that_of_the_mean_over_all_examples(n, batch):
    """23 examples, not padded: last batches differ, and with 4 x 5 one rank has none
    for a while."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((23, 3)), draw.integers(0, 2, 23)

    def train(m, model, loader, then=lambda: None):
        optimizer = optim.SGD(m.parameters(), lr=0.5, momentum=0.9)
        history = []

        def step():
            optimizer.step()
            history.append(weights(m))

        with model.join(then=step) if model is not m else no_join():
            for xs, ys in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(xs), ys).backward()
                step()
        return history

    def body(pg):
        m = mlp()
        ddp = DistributedDataParallel(m, pg, weight_by_batch=True)
        data = TensorDataset(x, y)
        sampler = DistributedSampler(data, n, pg.rank, shuffle=False, pad=False)
        return train(m, ddp, DataLoader(data, batch, sampler=sampler))

    alone = mlp()
    expected = train(alone, alone, DataLoader(TensorDataset(x, y), n * batch))
    for history in run_groups(n, body):
        np.testing.assert_allclose(history, expected, rtol=0, atol=1e-12)


class no_join:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def test_an_empty_batch_weighs_nothing_though_its_gradient_is_infinite():
    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg, weight_by_batch=True)
        x = np.ones((pg.rank, 1)) * 4.0  # rank 0 has no example
        loss = (ddp(x).sum() + m.weight.sum()) / np.float64(len(x))
        loss.backward()
        return m.weight.grad.item()

    with warnings.catch_warnings(action="ignore"):
        results = run_groups(2, body)
    assert results == [5.0, 5.0]


def test_only_the_forwards_behind_a_backward_count():
    """Not an evaluation of 100 examples, nor a batch that was left out."""

    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg, weight_by_batch=True)
        if pg.rank == 0:
            ddp.eval()
            ddp(np.ones((100, 1)))
            ddp.train()
        a, b = (
            ddp(np.full((1 + 2 * pg.rank, 1), x * (pg.rank + 1))).mean()
            for x in (4.0, 8.0)
        )
        a.backward()
        first = m.weight.grad.item()
        b.backward()
        return first, m.weight.grad.item()

    once = (1 * 4.0 + 3 * 8.0) / 4
    assert run_groups(2, body) == [(once, 3 * once)] * 2


def test_examples_are_those_of_the_first_tensor_wherever_it_is():
    class Sum(nn.Module):
        def __init__(self):
            self.layer = linear()

        def forward(self, batch, scale=1.0):
            return self.layer(batch["x"]) * scale

    def body(pg):
        m = Sum()
        ddp = DistributedDataParallel(m, pg, weight_by_batch=True)
        x = np.full((1 + 2 * pg.rank, 1), 4.0 * (pg.rank + 1))
        ddp({"name": "a batch", "x": x}).mean().backward()
        with pytest.raises(UsageError, match="the input has no tensor"):
            ddp({"x": 3})
        return m.layer.weight.grad.item()

    assert run_groups(2, body) == [7.0, 7.0]


def test_batch_norm_goes_along_with_join_and_with_weights():
    def body(pg, weighted):
        manual_seed(0)
        m = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        ddp = DistributedDataParallel(m, pg, weight_by_batch=weighted)
        draw = np.random.default_rng(pg.rank)
        with ddp.join():
            for _ in range(1 + pg.rank):
                x = draw.standard_normal((4, 3)).astype("f4")
                ddp(x).sum().backward()
        return [t.data.tobytes() for t in m.buffers()]

    for weighted in (False, True):
        first, second = run_groups(2, lambda pg, w=weighted: body(pg, w))
        assert first == second


@pytest.mark.parametrize("batches", [(3, 0), (0, 3), (3, 1)])
def test_a_static_graph_goes_along_with_join(batches):
    def body(pg):
        m = mlp()
        ddp = DistributedDataParallel(m, pg, static_graph=True, bucket_cap_mb=1e-6)
        optimizer = optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):  # in the second epoch rank 1, or 0, has its first batch
            with ddp.join():
                for _ in range(batches[pg.rank]):
                    optimizer.zero_grad()
                    ddp(np.full((2, 3), pg.rank + 1.0)).sum().backward()
                    optimizer.step()
        optimizer.zero_grad()
        ddp(np.full((2, 3), pg.rank + 1.0)).sum().backward()
        return [p.grad.data.tobytes() for p in m.parameters()]

    first, second = run_groups(2, body)
    assert first == second


def test_batches_of_equal_length_weigh_exactly_one():
    def body(pg, weighted):
        m = mlp()
        ddp = DistributedDataParallel(m, pg, weight_by_batch=weighted)
        x = np.random.default_rng(pg.rank).standard_normal((5, 3))
        ddp(x).mean().backward()
        return np.concatenate([p.grad.data.ravel() for p in m.parameters()]).tobytes()

    assert run_groups(3, lambda pg: body(pg, True)) == run_groups(
        3, lambda pg: body(pg, False)
    )


def test_micro_batches_add_up_to_the_weight_of_their_step():
    """Rank 0 has two micro-batches of 1, rank 1 two of 3: together the mean over 8."""

    def body(pg):
        m = linear()
        ddp = DistributedDataParallel(m, pg, weight_by_batch=True)
        x = np.full((1 + 2 * pg.rank, 1), 4.0 * (1 + pg.rank))
        with ddp.no_sync():
            (ddp(x).mean() / 2).backward()
        (ddp(x).mean() / 2).backward()
        return m.weight.grad.item()

    assert run_groups(2, body) == [(2 * 4.0 + 6 * 8.0) / 8] * 2
