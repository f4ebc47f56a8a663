"""Batch norm alone and over all ranks, and clipping: n ranks do as one process does."""

from functools import partial

import numpy as np
import pytest
from gradcheck import gradcheck

from minddp import functional as F
from minddp import manual_seed, nn, optim
from minddp import neural_ops as neural
from minddp.autograd import Tensor
from minddp.ddp import DistributedDataParallel
from minddp.errors import MindDPError, UsageError
from minddp.sync_batch_norm import SyncBatchNorm
from minddp.testing import run_groups

DTYPE = "float64"
BATCH, STEPS = 12, 5
TINY = 200 / 2**20  # MiB: buckets of one or two parameters


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def by_batch(x, weight=None, bias=None):
    return F.batch_norm(x, None, None, weight, bias, training=True)


# ---- One process ----


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4), (2, 3, 2, 2), (2, 0)])
def test_gradients_of_training_take_into_account_that_x_moves_the_mean(shape):
    W, b = numbers(*shape[1:2], seed=1), numbers(*shape[1:2], seed=2)
    gradcheck(by_batch, numbers(*shape), W, b)
    gradcheck(by_batch, numbers(*shape))


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4), (1, 3), (0, 3)])
def test_gradients_of_evaluation_take_the_statistics_as_they_are(shape):
    W, b = numbers(3, seed=1), numbers(3, seed=2)
    mean, var = np.array([0.5, 0.0, -2.0]), np.array([0.3, 1.0, 4.0])
    gradcheck(lambda x, W, b: F.batch_norm(x, mean, var, W, b), numbers(*shape), W, b)


def test_an_input_that_needs_no_gradient_leaves_those_of_weight_and_bias():
    W, b = (
        Tensor(np.ones(2), requires_grad=True),
        Tensor([0.0, 0.0], requires_grad=True),
    )
    by_batch(np.array([[1.0, 5.0], [3.0, 5.0]]), W, b).backward([[1.0, 2.0], [2.0, 1]])
    np.testing.assert_allclose(W.grad.data, [1, 0], rtol=1e-4)  # xhat is -1, 1 and 0, 0
    assert b.grad.tolist() == [3, 3]

    op = neural.BatchNorm(1e-5)
    op.needs = (False, True, True)
    op.forward(numbers(4, 2), W.data, b.data)
    assert op.backward(np.ones((4, 2)))[0] is None


def test_the_gradient_that_goes_on_has_the_dtype_of_the_input():
    op, x = neural.BatchNorm(1e-5), numbers(4, 2).astype("float16")
    op.forward(x, np.ones(2), np.zeros(2))
    assert op.backward(x)[0].dtype == np.float16


@pytest.mark.parametrize("shape", [(50, 2), (5, 2, 10), (5, 2, 2, 5)])
def test_each_channel_comes_out_with_mean_0_and_variance_1(shape):
    y = by_batch(numbers(*shape) * 7 + 3).data
    axes = (0, *range(2, len(shape)))
    np.testing.assert_allclose(y.mean(axes), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(axes), 1, rtol=1e-5)


def test_a_large_mean_cancels_no_digits_of_the_variance():
    """With x^2 = 1e16, the mean of squares would keep none of them."""
    x = numbers(20, 1)
    np.testing.assert_allclose(by_batch(x + 1e8).data, by_batch(x).data, atol=1e-6)


def test_the_output_has_the_dtype_of_the_input_and_float16_does_not_overflow():
    for dtype in ("float16", "float32", "float64"):
        x = Tensor(np.array([[-400.0], [400.0]] * 40_000, dtype), requires_grad=True)
        layer = nn.BatchNorm1d(1)
        y = layer(x)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype
        assert layer.weight.grad.dtype == layer.running_var.dtype == np.float32
        np.testing.assert_allclose(y.data[:2], [[-1], [1]], rtol=1e-6)
        assert layer.running_var.item() == pytest.approx(0.9 + 0.1 * 160_000, rel=1e-4)


def test_running_statistics_move_towards_the_mean_and_the_unbiased_variance():
    """Of 1, 3, 8: mean 4, squares 9 + 1 + 16 = 26, of which 26 / 2 is unbiased."""
    x = np.array([[1.0], [3.0], [8.0]])
    layer = nn.BatchNorm1d(1, dtype=DTYPE)
    array = layer.running_mean.data
    y = layer(x)
    assert layer.running_mean.data is array, "written in place"
    assert (array.item(), layer.running_var.item()) == pytest.approx((0.4, 2.2))
    np.testing.assert_allclose(y.data, (x - 4) / np.sqrt(26 / 3 + 1e-5))
    assert layer.num_batches_tracked.item() == 1

    layer.eval()
    np.testing.assert_allclose(layer(x).data, (x - 0.4) / np.sqrt(2.2 + 1e-5))
    assert (layer.num_batches_tracked.item(), array.item()) == (1, pytest.approx(0.4))


def test_without_momentum_the_running_statistics_are_the_average_over_batches():
    layer = nn.BatchNorm1d(1, momentum=None, dtype=DTYPE)
    for middle in (0.0, 6.0, 3.0):
        layer(np.array([[middle - 1], [middle + 1]]))
    assert layer.running_mean.item() == pytest.approx(3)
    assert layer.running_var.item() == pytest.approx(2)


def test_a_state_dict_has_pytorchs_keys_and_carries_the_statistics():
    layer, other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = numbers(2, 3, 2, 2).astype("float32") + 5
    layer(x)
    keys = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert list(layer.state_dict()) == keys
    other.load_state_dict(layer.state_dict())
    assert other.eval()(x).tolist() == layer.eval()(x).tolist()
    assert list(nn.BatchNorm1d(3, affine=False).state_dict()) == keys[2:]
    assert list(nn.BatchNorm1d(3, track_running_stats=False).state_dict()) == keys[:2]


def test_without_running_statistics_evaluation_goes_by_the_batch():
    layer, x = nn.BatchNorm1d(2, track_running_stats=False), numbers(5, 2)
    assert layer.eval()(x).tolist() == by_batch(x).tolist()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (0, 3)])
def test_less_than_2_values_per_channel_are_refused_and_change_nothing(shape, momentum):
    layer = nn.BatchNorm1d(3, momentum=momentum)
    before = [t.data.tolist() for t in layer.buffers()]
    with pytest.raises(UsageError, match="per channel have no variance"):
        layer(np.ones(shape))
    assert [t.data.tolist() for t in layer.buffers()] == before
    assert layer.eval()(np.ones(shape)).shape == shape


def test_wrong_shapes_are_refused_with_what_is_wanted():
    for layer, shape, wanted in [
        (
            nn.BatchNorm1d(3),
            (2, 3, 4, 4),
            r"\(N, 3\) or \(N, 3, L\), not \(2, 3, 4, 4\)",
        ),
        (nn.BatchNorm1d(3), (2, 4), r"\(N, 3\) or \(N, 3, L\), not \(2, 4\)"),
        (nn.BatchNorm2d(3), (2, 3), r"BatchNorm2d: .* \(N, 3, H, W\), not \(2, 3\)"),
        (nn.BatchNorm(3), (3,), r"BatchNorm: .* \(N, 3, ...\), not \(3,\)"),
    ]:
        with pytest.raises(UsageError, match=wanted):
            layer(np.ones(shape))
    x, ones = np.ones((2, 3)), np.ones(3)
    for call in (
        partial(F.batch_norm, x, ones, ones, ones, np.ones(1)),
        partial(F.batch_norm, x, np.ones((1, 3)), ones),
        partial(F.batch_norm, x.astype(int), ones, ones),
        partial(F.batch_norm, np.ones(3), None, None, training=True),
    ):
        with pytest.raises(UsageError, match=r"floats \(N, C, ...\)"):
            call()
    for mean, training in [(None, False), (ones, True)]:
        with pytest.raises(UsageError, match="give both"):
            F.batch_norm(x, mean, None, training=training)


def test_a_batch_norm_prints_its_settings():
    assert repr(nn.BatchNorm1d(4)) == (
        "BatchNorm1d(4, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)"
    )


# ---- All ranks ----


def model(seed=0):
    manual_seed(seed)
    return nn.Sequential(
        nn.BatchNorm1d(6, dtype=DTYPE),
        nn.Linear(6, 8, dtype=DTYPE),
        nn.BatchNorm1d(8, momentum=None, dtype=DTYPE),
        nn.Tanh(),
        nn.Linear(8, 3, dtype=DTYPE),
        nn.BatchNorm1d(3, affine=False, dtype=DTYPE),
    )


def train(m, sizes, rank=None, clip=None):
    """After every step: all tensors of m, and the norm of the gradient.

    The loss is the mean over the whole batch, of which a rank computes its own part.
    """
    optimizer = optim.SGD(m.parameters(), 0.1, 0.9)
    draw, history, parts = np.random.default_rng(1), [], np.cumsum([0, *sizes])
    own = slice(None) if rank is None else slice(parts[rank], parts[rank + 1])
    n = 1 if rank is None else len(sizes)
    for _ in range(STEPS):
        x, y = draw.standard_normal((BATCH, 6)) + 2, draw.integers(0, 3, BATCH)
        optimizer.zero_grad()
        loss = F.cross_entropy(m(x[own]), y[own], reduction="sum") * (n / BATCH)
        loss.backward()
        before = [p.grad.data for p in m.parameters()]
        norm = nn.utils.clip_grad_norm_(m.parameters(), clip or 1e9)
        after = [p.grad.data for p in m.parameters()]
        assert all(g is h for g, h in zip(before, after, strict=True)), "in place"
        optimizer.step()
        tensors = [t.data.copy() for t in [*m.parameters(), *m.buffers()]]
        history.append([*tensors, norm.data])
    return history


def trained_by(sizes, clip=None):
    """The history of every rank. Nobody broadcasts buffers: they must be equal."""

    def body(pg):
        synced = SyncBatchNorm.convert_sync_batchnorm(model(seed=pg.rank), pg)
        ddp = DistributedDataParallel(
            synced, pg, bucket_cap_mb=TINY, broadcast_buffers=False
        )
        return train(ddp, sizes, pg.rank, clip)

    return run_groups(len(sizes), body)


SIZES = [(12,), (6, 6), (4, 4, 4), (1, 11), (0, 12), (5, 0, 7)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_n_ranks_equal_one_process_on_the_whole_batch_after_every_step(sizes):
    expected = train(model(), sizes)
    for history in trained_by(sizes):
        for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
            for p, q in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(p, q, rtol=0, atol=1e-10, err_msg=f"{step}")


@pytest.mark.parametrize("sizes", [(6, 6), (5, 0, 7)], ids=str)
def test_ranks_agree_on_every_bit_of_parameters_statistics_and_norm(sizes):
    first, *others = trained_by(sizes, clip=0.05)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert [p.tobytes() for p in ours] == [q.tobytes() for q in theirs]


def test_the_mean_of_ranks_means_is_the_loss_if_their_batches_are_equal():
    x, y = numbers(BATCH, 6), np.arange(BATCH) % 3
    alone = model()
    F.cross_entropy(alone(x), y).backward()

    def body(pg):
        synced = SyncBatchNorm.convert_sync_batchnorm(model(), pg)
        ddp = DistributedDataParallel(synced, pg, bucket_cap_mb=TINY)
        own = slice(pg.rank, None, pg.world_size)
        F.cross_entropy(ddp(x[own]), y[own]).backward()
        return [p.grad.data for p in ddp.parameters()]

    for grads in run_groups(3, body):
        for p, g in zip(alone.parameters(), grads, strict=True):
            np.testing.assert_allclose(g, p.grad.data, rtol=0, atol=1e-12)


def test_ranks_may_differ_in_the_axes_behind_the_channels():
    """(N, C, L) with L of 2 and 5: what counts is N L."""
    parts = [numbers(3, 2, 2) + 1, numbers(1, 2, 5, seed=1)]
    weights = [numbers(*x.shape, seed=2) for x in parts]
    together = np.concatenate([x.swapaxes(0, 1).reshape(2, -1) for x in parts], 1).T
    x = Tensor(together, requires_grad=True)
    flat = np.concatenate([w.swapaxes(0, 1).reshape(2, -1) for w in weights], 1).T
    by_batch(x).backward(flat)

    def body(pg):
        mine = Tensor(parts[pg.rank], requires_grad=True)
        SyncBatchNorm(2, process_group=pg, dtype=DTYPE)(mine).backward(weights[pg.rank])
        return mine.grad.data.swapaxes(0, 1).reshape(2, -1)

    gradient = np.concatenate(run_groups(2, body), 1).T
    np.testing.assert_allclose(gradient, x.grad.data, rtol=0, atol=1e-12)


def test_statistics_of_all_ranks_cancel_no_digits():
    """The worked example, 1 and 3 here and 8 there, far away from 0."""
    parts = [np.array([[1.0], [3.0]]), np.array([[8.0]])]

    def body(pg):
        layer = SyncBatchNorm(1, momentum=1.0, process_group=pg, dtype=DTYPE)
        layer(parts[pg.rank] + 1e8)
        return layer.running_mean.item() - 1e8, layer.running_var.item()

    for mean_and_var in run_groups(2, body):
        assert mean_and_var == pytest.approx((4, 13), rel=1e-6)


def test_a_layer_costs_one_collective_each_way_and_none_in_evaluation():
    def body(pg):
        def collectives(call):
            before = pg.stats()["collectives"]
            return call(), pg.stats()["collectives"] - before

        layer, data = SyncBatchNorm(3, process_group=pg), numbers(2, 3)
        y, forward = collectives(lambda: layer(Tensor(data, requires_grad=True)))
        _, backward = collectives(y.sum().backward)
        y = layer(data)
        _, first_layer = collectives(y.sum().backward)
        layer.eval()
        evaluation = 0
        if pg.rank == 0:  # the others take no part
            _, evaluation = collectives(lambda: layer(data).sum().backward())
        return forward, backward, first_layer, evaluation

    assert run_groups(2, body) == [(1, 1, 0, 0)] * 2


@pytest.mark.parametrize("values", [0, 1])
def test_less_than_2_values_on_all_ranks_together_are_refused_on_all(values):
    def body(pg):
        with np.errstate(all="raise"):
            SyncBatchNorm(3, process_group=pg)(np.ones((pg.rank * values, 3)))

    with pytest.raises(MindDPError) as caught:
        run_groups(2, body)
    assert [type(e) for e in caught.value.of_ranks] == [UsageError] * 2


def test_without_a_group_it_evaluates_but_does_not_train():
    layer, x = SyncBatchNorm(3), np.ones((2, 3))
    assert layer.eval()(x).shape == (2, 3)
    with pytest.raises(UsageError, match="pass a process group"):
        layer.train()(x)


def test_conversion_keeps_tensors_names_order_mode_and_shared_layers():
    shared = nn.BatchNorm2d(2, momentum=0.3)
    m = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.ReLU(), shared)}).eval()
    tensors = [*m.named_parameters(), *m.named_buffers()]
    assert SyncBatchNorm.convert_sync_batchnorm(m) is m
    assert type(m["a"]) is SyncBatchNorm
    assert m["a"] is m["b"][1]
    assert (m["a"].momentum, m["a"].training) == (0.3, False)
    for (name, t), (new_name, new) in zip(
        tensors, [*m.named_parameters(), *m.named_buffers()], strict=True
    ):
        assert name == new_name
        assert t is new
    assert type(SyncBatchNorm.convert_sync_batchnorm(shared)) is SyncBatchNorm


# ---- Clipping ----


def parameters_with(*grads):
    parameters = []
    for g in grads:
        parameters.append(nn.Parameter(np.zeros_like(g)))
        parameters[-1].grad = Tensor(g)
    return parameters


@pytest.mark.parametrize(
    ("p", "norm"), [(1, 7), (2, 5), (3, 91 ** (1 / 3)), (np.inf, 4)]
)
def test_the_norm_is_one_over_all_gradients(p, norm):
    parameters = [
        *parameters_with(np.array([[3.0]]), np.array([0.0, -4.0])),
        Tensor(1.0),
    ]
    returned = nn.utils.clip_grad_norm_(iter(parameters), 0.5, p)
    assert returned.item() == pytest.approx(norm)
    assert (returned.shape, returned.dtype) == ((), DTYPE)
    clipped = [q.grad.data.ravel().tolist() for q in parameters[:2]]
    scale = 0.5 / (norm + 1e-6)
    assert clipped == [[pytest.approx(3 * scale)], pytest.approx([0, -4 * scale])]
    assert parameters[2].grad is None


def test_short_gradients_stay_as_they_are():
    (p,) = parameters_with(np.array([3.0, 4.0]))
    assert nn.clip_grad_norm_(p, 5.1).item() == 5
    assert p.grad.tolist() == [3, 4]
    assert nn.clip_grad_norm_([], 1.0).item() == 0


def test_gradients_of_float16_neither_overflow_nor_lose_the_scale():
    """The norm, 3e6, is no float16, and the scale, 10 / 3e6, is a rough one."""
    (p,) = parameters_with(np.full(10_000, 30_000, "float16"))
    assert nn.clip_grad_norm_([p], 10.0).item() == pytest.approx(3e6)
    assert p.grad.dtype == np.float16
    np.testing.assert_allclose(p.grad.data, 0.1, rtol=1e-3)


def test_clipping_writes_into_the_view_that_a_gradient_is():
    flat = np.array([9.0, 3.0, 4.0, 9.0])
    (p,) = parameters_with(flat[1:3])
    nn.clip_grad_norm_([p], 1.0)
    assert flat.tolist() == pytest.approx([9, 0.6, 0.8, 9], rel=1e-5)
    nn.utils.clip_grad_value_([p], 0.7)
    assert flat.tolist() == pytest.approx([9, 0.6, 0.7, 9], rel=1e-5)


def test_a_norm_that_is_not_finite_is_refused_or_shows_in_all_gradients():
    for bad in (np.inf, np.nan):
        p, q = parameters_with(np.array([bad]), np.array([2.0]))
        with pytest.raises(UsageError, match=f"is {bad}"):
            nn.clip_grad_norm_([p, q], 1.0, error_if_nonfinite=True)
        assert q.grad.tolist() == [2.0]
        with np.errstate(invalid="ignore"):  # 0 times infinity
            nn.clip_grad_norm_([p, q], 1.0)
        assert np.isnan(p.grad.item())
        assert q.grad.item() == 0 or np.isnan(q.grad.item())


def test_wrong_settings_of_clipping_are_refused():
    ps = parameters_with(np.array([3.0]))
    for call in (
        partial(nn.clip_grad_norm_, ps, -1.0),
        partial(nn.clip_grad_norm_, ps, np.nan),
        partial(nn.clip_grad_norm_, ps, 1.0, 0),
        partial(nn.clip_grad_norm_, set(ps), 1.0),
        partial(nn.clip_grad_value_, ps, "1"),
    ):
        with pytest.raises(UsageError, match="clip_grad_"):
            call()
    assert ps[0].grad.tolist() == [3.0]


@pytest.mark.parametrize("n", [2, 3])
def test_clipped_steps_under_ddp_are_those_of_one_process(n):
    """Its norm is that of the averaged gradient: it does not grow with n."""

    def plain(seed=0):
        manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 8, dtype=DTYPE), nn.Tanh(), nn.Linear(8, 3, dtype=DTYPE)
        )

    sizes = [BATCH // n] * n

    def body(pg):
        ddp = DistributedDataParallel(plain(pg.rank), pg, bucket_cap_mb=TINY)
        return train(ddp, sizes, pg.rank, clip=0.05)

    expected = train(plain(), sizes, clip=0.05)
    first, *others = run_groups(n, body)
    for ours, theirs in zip(first, expected, strict=True):
        for p, q in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(p, q, rtol=0, atol=1e-12)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert [p.tobytes() for p in ours] == [q.tobytes() for q in theirs]
    assert first[0][-1] > 0.05, "it does clip"
