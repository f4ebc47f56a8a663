"""DDP on n ranks against one process on the whole batch, after every single step."""

from functools import partial

import numpy as np
import pytest

from minddp import functional as F
from minddp import manual_seed, nn, optim
from minddp.autograd import Tensor
from minddp.ddp import DistributedDataParallel, NaiveDistributedDataParallel
from minddp.errors import MindDPError, PeerMismatch
from minddp.frame import HEADER_BYTES
from minddp.testing import run_groups

STEPS = 20
BATCH = 12  # divisible by 1, 2, 3 and 4
DTYPE = "float64"


KINDS = {
    "naive": NaiveDistributedDataParallel,
    "bucketed": DistributedDataParallel,
    # Buckets of one parameter, of two, and so on: 8 x 6 + 8 + 3 x 8 + 3 numbers in all.
    "tiny buckets": partial(DistributedDataParallel, bucket_cap_mb=200 / 2**20),
}


@pytest.fixture(params=KINDS)
def DDP(request):
    return KINDS[request.param]


def model(seed=0, dtype=DTYPE):
    manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 3, dtype=dtype)
    )


def batches(dtype=DTYPE):
    draw = np.random.default_rng(1)
    for _ in range(STEPS):
        yield draw.standard_normal((BATCH, 6)).astype(dtype), draw.integers(0, 3, BATCH)


def snapshot(m):
    return [p.data.copy() for p in m.parameters()]


def train(m, share=slice(None), make=lambda m: optim.SGD(m.parameters(), 0.2, 0.9)):
    """The parameters after every step on `share` of every batch."""
    optimizer, history = make(m), []
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(m(x[share]), y[share]).backward()
        optimizer.step()
        history.append(snapshot(m))
    return history


def trained_by(DDP, n, **settings):
    """The history of every rank; rank r takes the examples r, r + n, ... of a batch."""

    def body(pg):
        ours = model(seed=pg.rank)  # construction must make them equal
        return train(DDP(ours, pg), slice(pg.rank, None, n), **settings)

    return run_groups(n, body)


OPTIMIZERS = {
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda m: optim.AdamW(m.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_n_ranks_equal_one_process_after_every_step(DDP, n, name):
    expected = train(model(), make=OPTIMIZERS[name])
    for history in trained_by(DDP, n, make=OPTIMIZERS[name]):
        for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
            for p, q in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(p, q, rtol=0, atol=1e-12, err_msg=f"{step}")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_have_the_same_bits_after_every_step(DDP, n):
    first, *others = trained_by(DDP, n)
    assert all(
        p.tobytes() == q.tobytes()
        for other in others
        for ours, theirs in zip(first, other, strict=True)
        for p, q in zip(ours, theirs, strict=True)
    )
    assert first[0][0].tobytes() != first[1][0].tobytes(), "it does train"


def test_two_ranks_have_the_bits_of_one_process_that_adds_up_two_shares(DDP):
    alone = model()
    optimizer, expected = optim.SGD(alone.parameters(), 0.2, 0.9), []
    for x, y in batches():
        optimizer.zero_grad()
        for share in (slice(0, None, 2), slice(1, None, 2)):
            F.cross_entropy(alone(x[share]), y[share]).backward()
        for p in alone.parameters():
            p.grad.data /= 2
        optimizer.step()
        expected.append(snapshot(alone))
    for history in trained_by(DDP, 2):
        for ours, theirs in zip(history, expected, strict=True):
            assert [p.tobytes() for p in ours] == [q.tobytes() for q in theirs]


def test_gradients_are_the_average_when_backward_returns(DDP):
    def body(pg):
        m = nn.Linear(2, 1, bias=False, dtype=DTYPE)
        ddp = DDP(m, pg)
        ddp(np.array([[1.0, 10.0]]) * (pg.rank + 1)).sum().backward()
        return m.weight.grad.data.tolist()

    assert run_groups(3, body) == [[[2.0, 20.0]]] * 3


def test_parameters_and_buffers_start_as_those_of_rank_0(DDP):
    class WithBuffer(nn.Module):
        def __init__(self, rank):
            self.linear = nn.Linear(3, 3)
            self.register_buffer("mean", np.full(4, float(rank)))

        def forward(self, x):
            return self.linear(x)

    def body(pg):
        manual_seed(pg.rank)
        ddp = DDP(WithBuffer(pg.rank), pg)
        return [p.data.tobytes() for p in [*ddp.parameters(), *ddp.buffers()]]

    first, second = run_groups(2, body)
    assert first == second
    assert np.frombuffer(first[-1]).tolist() == [0.0] * 4


def test_an_optimizer_built_before_wrapping_trains_the_same_parameters(DDP):
    def body(pg):
        m = model(seed=pg.rank)
        optimizer = optim.SGD(m.parameters(), lr=0.2, momentum=0.9)
        return train(DDP(m, pg), slice(pg.rank, None, 2), make=lambda _: optimizer)[-1]

    expected = train(model())[-1]
    for ours in run_groups(2, body):
        for p, q in zip(ours, expected, strict=True):
            np.testing.assert_allclose(p, q, rtol=0, atol=1e-12)


def test_a_tied_weight_is_reduced_once_and_frozen_ones_never(DDP):
    class Tied(nn.Module):
        def __init__(self):
            self.a = nn.Linear(3, 3, bias=False, dtype=DTYPE)
            self.b = nn.Linear(3, 3, bias=False, dtype=DTYPE)
            self.b.weight = self.a.weight
            self.frozen = nn.Linear(3, 3, dtype=DTYPE).requires_grad_(False)

        def forward(self, x):
            return self.b(self.a(self.frozen(x)))

    def body(pg):
        ddp = DDP(Tied(), pg)
        ddp(np.ones((1, 3))).sum().backward()  # after the first, buckets are rebuilt
        before = pg.stats()
        ddp(np.ones((1, 3)) * (pg.rank + 1)).sum().backward()
        after = pg.stats()
        return {key: after[key] - before[key] for key in after}

    for used in run_groups(2, body):
        assert used["collectives"] == 1
        assert used["bytes_sent"] == 9 * 8 + HEADER_BYTES


def test_naive_ddp_takes_zeros_for_a_parameter_that_a_rank_does_not_use():
    def body(pg):
        a, b = (nn.Linear(1, 1, bias=False, dtype=DTYPE) for _ in range(2))
        both = nn.ModuleList([a, b])
        ddp = NaiveDistributedDataParallel(both, pg)  # kept: its hooks end with it
        x = np.array([[4.0]])
        (a(x) + b(x) if pg.rank == 0 else a(x)).sum().backward()
        assert ddp.module is both
        return a.weight.grad.item(), b.weight.grad.item()

    assert run_groups(2, body) == [(4.0, 2.0)] * 2


def test_accumulated_gradients_stay_averages(DDP):
    def body(pg):
        m = nn.Linear(1, 1, bias=False, dtype=DTYPE)
        ddp = DDP(m, pg)
        for _ in range(2):
            ddp(np.array([[float(pg.rank)]])).sum().backward()
        return m.weight.grad.item()

    assert run_groups(2, body) == [1.0] * 2  # (0 + 1) / 2, twice


def test_two_forwards_before_one_backward_are_averaged_once(DDP):
    def body(pg):
        m = nn.Linear(1, 1, bias=False, dtype=DTYPE)
        ddp = DDP(m, pg)
        ddp(np.array([[0.0]])).sum().backward()  # after the first, buckets are rebuilt
        calls = pg.stats()["collectives"]
        m.zero_grad()
        (ddp(np.array([[1.0]])) + ddp(np.array([[float(pg.rank)]]))).sum().backward()
        return m.weight.grad.item(), pg.stats()["collectives"] - calls

    assert run_groups(2, body) == [(1.5, 1)] * 2


def test_evaluation_does_not_communicate(DDP):
    def body(pg):
        ddp = DDP(model(), pg)
        calls = pg.stats()["collectives"]
        ddp.eval()
        if pg.rank == 0:  # the others take no part
            ddp(np.ones((2, 6)))
        return pg.stats()["collectives"] - calls

    assert run_groups(2, body) == [0, 0]


def test_naive_ddp_notices_a_parameter_of_another_shape():
    def body(pg):
        NaiveDistributedDataParallel(nn.Linear(4, 3 + pg.rank), pg)

    with pytest.raises(PeerMismatch) as caught:
        run_groups(2, body)
    for error in caught.value.of_ranks:
        assert "of 12 float32" in str(error)
        assert "of 16 float32" in str(error)


def test_a_failure_in_one_ranks_forward_reaches_the_others_in_backward(DDP):
    def body(pg):
        ddp = DDP(model(), pg)
        x, y = next(batches())
        if pg.rank == 1:
            y = y + 10  # labels out of range
        F.cross_entropy(ddp(x), y).backward()

    with pytest.raises(MindDPError) as caught:
        run_groups(3, body)
    errors = caught.value.of_ranks
    assert "rank 1 ended with UsageError" in str(errors[0])
    assert errors[0].culprit == errors[2].culprit == 1


def test_a_state_dict_carries_pytorchs_prefix(DDP):
    def body(pg):
        return list(DDP(model(), pg).state_dict())

    keys = ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]
    assert run_groups(2, body) == [keys] * 2


def test_the_wrapped_model_takes_tensors_and_keywords(DDP):
    class Scale(nn.Module):
        def __init__(self):
            self.weight = nn.Parameter(np.ones(2))

        def forward(self, x, *, by=1.0):
            return x * self.weight * by

    def body(pg):
        return DDP(Scale(), pg)(Tensor(np.ones(2)), by=3.0).detach().numpy().tolist()

    assert run_groups(2, body) == [[3.0, 3.0]] * 2


def test_after_an_error_in_one_backward_the_next_one_averages_again(DDP):
    """An exception drops what was queued; it must not be taken for queued still."""

    def body(pg):
        m = nn.Linear(2, 1, bias=False, dtype=DTYPE)
        ddp = DDP(m, pg)

        def fail(_):
            raise ValueError("a hook of the user's")

        handle = m.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(ValueError, match="a hook"):
            ddp(np.ones((1, 2))).sum().backward()
        handle.remove()
        m.zero_grad()
        ddp(np.ones((1, 2)) * (pg.rank + 1)).sum().backward()
        return m.weight.grad.data.tolist()

    assert run_groups(2, body) == [[[1.5, 1.5]]] * 2


def test_a_model_can_be_wrapped_again_and_be_trained_alone_afterwards(DDP):
    def body(pg):
        m = nn.Linear(1, 1, bias=False, dtype=DTYPE)
        for _ in range(2):
            ddp = DDP(m, pg)
            ddp(np.array([[1.0]])).sum().backward()
            before = pg.stats()["collectives"]
            m.zero_grad()
            ddp(np.array([[float(pg.rank)]])).sum().backward()
            assert pg.stats()["collectives"] - before == 1, "one hook, not two"
            assert m.weight.grad.item() == 0.5
            del ddp
        pg.close()
        m.zero_grad()
        m(np.array([[7.0]])).sum().backward()
        return m.weight.grad.item()

    assert run_groups(2, body) == [7.0] * 2
