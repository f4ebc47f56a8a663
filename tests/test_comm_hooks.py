"""Communication hooks: what they send, and what comes back."""

import numpy as np
import pytest

from minddp import manual_seed, nn
from minddp.comm_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from minddp.ddp import DistributedDataParallel
from minddp.errors import UsageError
from minddp.local_sgd import (
    PeriodicModelAverager,
    PostLocalSGDState,
    average_parameters,
    post_localSGD_hook,
)
from minddp.powersgd import PowerSGDState, powerSGD_hook
from minddp.testing import run_groups


def gradients(pg, hook=None, dtype="float32"):
    """(gradients, bytes of arrays that one backward sends) with this hook."""
    manual_seed(0)
    m = nn.Sequential(
        nn.Linear(8, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 8, dtype=dtype)
    )
    ddp = DistributedDataParallel(m, pg, check_sync_every=0)
    if hook:
        ddp.register_comm_hook(pg, hook)
    x = np.random.default_rng(pg.rank).standard_normal((4, 8)).astype(dtype)
    ddp(x).sum().backward()  # the buckets are rebuilt after it
    m.zero_grad()
    before = pg.stats()
    ddp(x).sum().backward()
    after = pg.stats()
    headers = after["header_bytes"] - before["header_bytes"]
    sent = after["bytes_sent"] - before["bytes_sent"] - headers
    return np.concatenate([p.grad.data.ravel() for p in m.parameters()]), sent


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_default_hook_is_the_average(n):
    def body(pg):
        (with_hook, _), (without, _) = gradients(pg, allreduce_hook), gradients(pg)
        return with_hook.tobytes() == without.tobytes()

    assert run_groups(n, body) == [True] * n


@pytest.mark.parametrize(
    ("hook", "error"), [(fp16_compress_hook, 2e-3), (bf16_compress_hook, 2e-2)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_sixteen_bits_halve_the_bytes_and_keep_some_digits(n, dtype, hook, error):
    def body(pg):
        return gradients(pg, hook, dtype), gradients(pg, None, dtype)

    results = run_groups(n, body)
    for (compressed, few), (exact, many) in results:
        if n > 1:
            assert few * np.dtype(dtype).itemsize == many * 2
        np.testing.assert_allclose(compressed, exact, rtol=error, atol=error)
        assert compressed.tobytes() == results[0][0][0].tobytes(), "the same on all"
        assert compressed.dtype == dtype


def test_the_sum_does_not_overflow_where_the_average_does_not():
    def body(pg):
        m = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(m, pg)
        ddp.register_comm_hook(pg, fp16_compress_hook)
        ddp(np.full((1, 1), 40_000.0, np.float32)).sum().backward()
        return m.weight.grad.item()

    assert run_groups(4, body) == [40_000.0] * 4


def test_a_hook_of_the_users_sees_every_bucket_once_in_order():
    def body(pg):
        seen = []

        def hook(state, bucket):
            seen.append((state, bucket.index))
            return allreduce_hook(pg, bucket)

        m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ddp = DistributedDataParallel(m, pg, bucket_cap_mb=1e-6)
        ddp.register_comm_hook("mine", hook)
        ddp(np.ones((1, 4), np.float32)).sum().backward()
        return seen

    expected = [("mine", k) for k in range(4)]
    assert run_groups(2, body) == [expected] * 2


def test_bfloat16_has_the_range_of_float32():
    def body(pg):
        m = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(m, pg)
        ddp.register_comm_hook(pg, bf16_compress_hook)
        ddp(np.full((1, 1), 2.0**100, np.float32)).sum().backward()
        return m.weight.grad.item()

    assert run_groups(4, body) == [2.0**100] * 4


# ---- PowerSGD ----


class Given(nn.Module):
    """A model whose gradients are what it is called with."""

    def __init__(self, shape):
        self.weight = nn.Parameter(np.zeros(shape))
        self.bias = nn.Parameter(np.zeros(shape[0]))

    def forward(self, w, b):
        return (self.weight * w).sum() + (self.bias * b).sum()


class Gradients:
    """Steps whose gradients are given."""

    def __init__(self, pg, state, shape=(6, 8)):
        self.m = Given(shape)
        self.ddp = DistributedDataParallel(self.m, pg, check_sync_every=0)
        self.ddp.register_comm_hook(state, powerSGD_hook)

    def average(self, gradient):
        """What the hook makes of these gradients, (weights, bias)."""
        self.m.zero_grad()
        self.ddp(*gradient).backward()
        return [p.grad.data.copy() for p in self.m.parameters()]


def drawn(rank, step, shape=(6, 8)):
    draw = np.random.default_rng([rank, step])
    return draw.standard_normal(shape), draw.standard_normal(shape[0])


def mean_of(n, step):
    parts = [drawn(r, step) for r in range(n)]
    return [np.mean(each, axis=0) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("shape", [(6, 8), (8, 6)])
def test_powersgd_at_full_rank_is_the_average(n, shape):
    def body(pg):
        state = PowerSGDState(pg, 6, start_powerSGD_iter=2, min_compression_rate=1e-9)
        steps = Gradients(pg, state, shape)
        return [steps.average(drawn(pg.rank, step, shape)) for step in range(4)]

    for averages in run_groups(n, body):
        for step, (w, b) in enumerate(averages):
            parts = [drawn(r, step, shape) for r in range(n)]
            np.testing.assert_allclose(w, np.mean([p[0] for p in parts], 0), atol=1e-12)
            np.testing.assert_allclose(b, np.mean([p[1] for p in parts], 0), atol=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_powersgd_loses_nothing_what_it_does_not_send_is_kept(n):
    """All that was given back, and the errors that are left, add up to all averages."""

    def body(pg):
        state = PowerSGDState(pg, 1, start_powerSGD_iter=3)
        steps = Gradients(pg, state)
        total = sum(steps.average(drawn(pg.rank, step))[0] for step in range(8))
        [flat] = state.errors.values()
        [bucket] = steps.ddp.buckets
        slot = next(i for i, p in enumerate(bucket.parameters) if p is steps.m.weight)
        start = sum(p.data.size for p in bucket.parameters[:slot])
        return total, flat[start : start + 48].reshape(6, 8), state.compression_stats()

    results = run_groups(n, body)
    exact = sum(mean_of(n, step)[0] for step in range(8))
    left = np.mean([error for _, error, _ in results], axis=0)
    for total, _, stats in results:
        np.testing.assert_allclose(total + left, exact, atol=1e-12)
        assert abs(total - exact).max() > 0.01, "it is an approximation"
        assert stats[1:] == (6 * 54, 6 * (6 + 8 + 6))
        assert total.tobytes() == results[0][0].tobytes(), "the same on all ranks"


def test_powersgd_goes_on_from_step_to_step_where_it_starts_warm():
    """With the same gradient in each step it comes to the best matrix of rank 1."""
    same = drawn(0, 0)
    u, s, vt = np.linalg.svd(same[0])
    best = s[0] * np.outer(u[:, 0], vt[0])

    def body(pg, warm):
        state = PowerSGDState(
            pg, 1, 2, use_error_feedback=False, warm_start=warm, seed=3
        )
        steps = Gradients(pg, state)
        return [abs(steps.average(same)[0] - best).max() for _ in range(40)]

    for warm in run_groups(2, lambda pg: body(pg, True)):
        assert warm[-1] < 1e-3
        assert warm[1] > 0.1
    for cold in run_groups(2, lambda pg: body(pg, False)):
        assert min(cold[1:]) > 0.01


def test_powersgd_begins_when_it_is_told_to_and_then_sends_little():
    def body(pg):
        m = nn.Linear(100, 50)
        ddp = DistributedDataParallel(m, pg, check_sync_every=0)
        ddp.register_comm_hook(
            PowerSGDState(pg, 2, start_powerSGD_iter=4), powerSGD_hook
        )
        sent = []
        for _ in range(5):
            before = pg.stats()
            ddp(np.ones((1, 100), np.float32)).sum().backward()
            after = pg.stats()
            headers = after["header_bytes"] - before["header_bytes"]
            sent.append(after["bytes_sent"] - before["bytes_sent"] - headers)
        return sent[1:]  # the first step rebuilds the buckets as well

    plain, compressed = 4 * 5050, 4 * (2 * 150 + 50)
    assert run_groups(2, body) == [[plain, plain, compressed, compressed]] * 2


def test_powersgd_recovers_from_a_step_that_was_skipped():
    def body(pg):
        m = nn.Linear(8, 8, bias=False, dtype="float64")
        ddp = DistributedDataParallel(m, pg, nan="skip", check_sync_every=0)
        ddp.register_comm_hook(PowerSGDState(pg, 1, 2), powerSGD_hook)
        finite = []
        for step in range(6):
            m.zero_grad()
            x = np.random.default_rng(step).standard_normal((4, 8))
            if step == 3 and pg.rank == 1:
                x[0, 0] = np.nan
            ddp(x).sum().backward()
            finite.append(m.weight.grad is not None)
        return finite, ddp.skipped_steps

    assert run_groups(2, body) == [([True] * 3 + [False] + [True] * 2, 1)] * 2


def test_powersgd_leaves_what_it_would_not_shrink():
    state = PowerSGDState(None, 4)
    assert state.worth_it((64, 64))  # 4,096 numbers against 2 x 512
    assert not state.worth_it((8, 64))  # 512 against 2 x 288
    assert not state.worth_it((4096,))
    assert state.worth_it((16, 8, 8))  # 1,024 against 2 x 320


@pytest.mark.parametrize(
    "settings", [{"start_powerSGD_iter": 1}, {"matrix_approximation_rank": 0}]
)
def test_powersgd_refuses_settings_without_sense(settings):
    with pytest.raises(UsageError):
        PowerSGDState(None, **settings)


# ---- Local SGD ----


def test_parameters_are_averaged_in_every_period_and_nothing_else_is_sent():
    def body(pg):
        m = nn.Linear(1, 1, bias=False, dtype="float64")
        m.weight.data[...] = 0.0
        ddp = DistributedDataParallel(m, pg)
        averager = PeriodicModelAverager(3, warmup_steps=1, process_group=pg)
        seen = []
        calls = pg.stats()["collectives"]
        for _ in range(8):
            with ddp.no_sync():
                ddp(np.ones((1, 1))).sum().backward()
            m.weight.data += pg.rank + 1.0
            averager.average_parameters(m.parameters())
            seen.append(m.weight.item())
        return seen, pg.stats()["collectives"] - calls

    # Step 0 is warm-up; averages come in steps 1, 4 and 7.
    ours = [[r, 3, 3 + r, 3 + 2 * r, 7.5, 7.5 + r, 7.5 + 2 * r, 12] for r in (1, 2)]
    assert run_groups(2, body) == [(seen, 3) for seen in ours]


def test_averaging_keeps_shapes_and_dtypes_apart():
    def body(pg):
        arrays = [
            np.full((2, 3), pg.rank, np.float32),
            np.full((), pg.rank + 1.0),
            np.full((3,), pg.rank + 2, np.float32),
        ]
        average_parameters(map(nn.Parameter, arrays), pg)
        return [x.tolist() for x in arrays], [str(x.dtype) for x in arrays]

    values = [[[0.5] * 3] * 2, 1.5, [2.5] * 3]
    dtypes = ["float32", "float64", "float32"]
    assert run_groups(2, body) == [(values, dtypes)] * 2


def test_post_local_sgd_stops_sending_when_it_is_told_to():
    def body(pg):
        m = nn.Linear(1, 1, bias=False, dtype="float64")
        ddp = DistributedDataParallel(m, pg, check_sync_every=0)
        ddp.register_comm_hook(PostLocalSGDState(pg, 2), post_localSGD_hook)
        seen = []
        for _ in range(4):
            m.zero_grad()
            ddp(np.full((1, 1), pg.rank + 1.0)).sum().backward()
            seen.append(m.weight.grad.item())
        return seen

    assert run_groups(2, body) == [[1.5, 1.5, 1.0, 1.0], [1.5, 1.5, 2.0, 2.0]]


def test_a_period_of_no_steps_is_refused():
    with pytest.raises(UsageError):
        PeriodicModelAverager(0, process_group=None)
