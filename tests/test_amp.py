"""Mixed precision: what is rounded, what is scaled, and who skips a step."""

import io
import warnings

import numpy as np
import pytest

import minddp
from minddp import amp, nn, optim
from minddp import functional as F
from minddp import tensor_ops as ops
from minddp.amp import GradScaler, autocast
from minddp.autograd import Tensor, checkpoint
from minddp.ddp import DistributedDataParallel
from minddp.errors import UsageError
from minddp.testing import run_groups

HALF, SINGLE = np.dtype("float16"), np.dtype("float32")


def tensor(*shape, seed=0, scale=1.0, dtype="float32", requires_grad=False):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * scale).astype(dtype)
    return Tensor(x, requires_grad)


def rounded(x, dtype=HALF):
    """x rounded to half precision, as float32."""
    if dtype == HALF:
        return x.astype(HALF).astype(SINGLE)
    bits = x.view("uint32")  # bfloat16: to the nearest, ties to even
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(SINGLE)


# ---- autocast: which ops, and to what ----


def test_a_product_rounds_its_inputs_adds_in_float32_and_rounds_the_result():
    x, w, b = tensor(5, 300), tensor(7, 300, seed=1), tensor(7, seed=2)
    with autocast("cpu", dtype="float16"):
        y, z = F.linear(x, w, b), x @ w.transpose(0, 1)
    exact = rounded(x.data) @ rounded(w.data).T
    assert y.dtype == z.dtype == HALF
    assert (z.data == exact.astype(HALF)).all()
    assert (y.data == (exact + rounded(b.data)).astype(HALF)).all()
    assert x.dtype == w.dtype == SINGLE


def test_gradients_pass_half_precision_and_arrive_in_float32():
    x = tensor(5, 30, requires_grad=True)
    w = tensor(7, 30, seed=1, requires_grad=True)
    gy = tensor(5, 7, seed=2, dtype="float16")
    with autocast("cpu", dtype="float16"):
        y = F.linear(x, w)
    y.backward(gy)
    g = gy.data.astype(SINGLE)
    assert w.grad.dtype == x.grad.dtype == SINGLE
    assert (w.grad.data == rounded(g.T @ rounded(x.data))).all()
    assert (x.grad.data == rounded(g @ rounded(w.data))).all()


def test_a_gradient_that_comes_in_float32_is_rounded_first():
    """A loss in float32 hands its float32 gradient to a result in float16."""
    w = Tensor(np.ones((1, 1), SINGLE), requires_grad=True)
    fine = np.full((3, 1), 1 + 0.4 * 2**-10, SINGLE)  # 1 in float16
    with autocast("cpu", dtype="float16"):
        loss = (F.linear(np.ones((3, 1), SINGLE), w) * Tensor(fine)).sum()
    loss.backward()
    assert w.grad.item() == 3, "not the sum rounded, 3.002"


def test_two_gradients_of_half_precision_are_added_in_float32():
    w = Tensor(np.array([[1, 2**-12]], SINGLE))
    x = Tensor(np.ones((1, 1), SINGLE), requires_grad=True)
    with autocast("cpu", dtype="float16"):
        h = -x
        (h @ w[:, :1] + h @ w[:, 1:]).backward()
    assert x.grad.item() == -1 - 2**-12


def test_a_gradient_that_nobody_needs_is_not_computed():
    op = amp.Rounded(ops.MatMul(), lambda x: x)
    op.needs = [False, True]
    op.forward(np.ones((2, 2), SINGLE), np.ones((2, 2), SINGLE))
    assert op.backward(np.ones((2, 2), SINGLE))[0] is None


def test_a_small_gradient_is_lost_and_a_scaled_one_survives():
    for scale, survives in ((1.0, False), (2.0**16, True)):
        w = Tensor(np.ones((1, 1), SINGLE), requires_grad=True)
        with autocast("cpu", dtype="float16"):
            y = F.linear(np.ones((1, 1), SINGLE), w)
            loss = (y.float() * np.float32(1e-8)).sum()
        (loss * scale).backward()
        assert (w.grad.item() > 0) == survives
        if survives:
            assert w.grad.item() / scale == pytest.approx(1e-8, rel=1e-3)


def test_bfloat16_rounds_the_values_of_float32_arrays():
    x, w = tensor(5, 300), tensor(7, 300, seed=1)
    with autocast("cpu"):  # the usual dtype of a CPU
        y = F.linear(x, w)
        loss = y.sum()
    exact = rounded(x.data, "bfloat16") @ rounded(w.data, "bfloat16").T
    assert y.dtype == loss.dtype == SINGLE
    assert (y.data == rounded(exact, "bfloat16")).all()


def test_sums_and_losses_of_half_precision_are_taken_in_float32():
    logits = Tensor(np.full((2, 3), 300, HALF), requires_grad=True)
    with autocast("cpu", dtype="float16"):
        square, total = logits**2, Tensor(np.full(4000, 100, HALF)).sum()
        loss, shares = F.mse_loss(logits, logits.data * 0), F.softmax(logits)
        kept = F.relu(logits)
    assert square.dtype == total.dtype == loss.dtype == shares.dtype == SINGLE
    assert (square.data == 90_000).all()
    assert total.item() == 400_000
    assert loss.item() == 90_000
    assert kept.dtype == HALF
    loss.backward()
    assert logits.grad.dtype == HALF


def test_what_is_not_to_be_changed_is_not():
    x, w = tensor(2, 3), tensor(4, 3, seed=1)
    double = tensor(2, 3, dtype="float64")
    plain = F.linear(x, w).data
    with autocast("cpu", dtype="float16"):
        assert F.linear(double, double).dtype == np.float64
        assert (x + x).dtype == SINGLE
        assert x.exp().dtype == SINGLE
        with autocast("cpu", enabled=False):
            assert (F.linear(x, w).data == plain).all()
        with autocast("cpu", dtype="float32"):
            assert (F.linear(x, w).data == plain).all()
        assert F.linear(x, w).dtype == HALF, "the outer one again"
    with autocast("cuda", dtype="float16"):
        assert (F.linear(x, w).data == plain).all(), "these arrays are on the host"
    assert (F.linear(x, w).data == plain).all()


def test_a_failure_inside_switches_it_off():
    context = autocast("cpu", dtype="float16")
    with pytest.raises(ZeroDivisionError), context, context:
        1 / 0  # noqa: B018
    assert F.linear(tensor(2, 3), tensor(4, 3)).dtype == SINGLE


def test_autocast_above_a_function():
    @autocast("cpu", dtype="float16")
    def forward(x):
        return F.linear(x, tensor(4, 3))

    assert forward(tensor(2, 3)).dtype == HALF
    assert F.linear(tensor(2, 3), tensor(4, 3)).dtype == SINGLE


def test_an_overflow_is_infinite_and_makes_no_warning():
    x = Tensor(np.full((1, 2), 300, SINGLE))
    with warnings.catch_warnings(), autocast("cpu", dtype="float16"):
        warnings.simplefilter("error")
        assert F.linear(x, x).item() == np.inf


def test_what_is_computed_again_is_computed_as_before():
    """checkpoint() runs its function in backward, when `with` has ended."""
    dtypes, gradients = [], []
    for keep in (lambda f, x: f(x), checkpoint):
        w = tensor(4, 3, requires_grad=True)

        def inside(x, w=w):
            y = F.linear(x, w)
            dtypes.append(y.dtype)
            return y.float().tanh()

        with autocast("cpu", dtype="float16"):
            y = keep(inside, tensor(2, 3, seed=1, requires_grad=True))
        (y * y).sum().backward()
        gradients.append(w.grad.data)
        assert F.linear(w, w).dtype == SINGLE, "off again"
    assert dtypes == [HALF] * 3
    assert (gradients[0] == gradients[1]).all()


@pytest.mark.parametrize("op", amp.HALF + amp.FLOAT)
def test_an_op_is_in_one_list_only(op):
    assert [*amp.HALF, *amp.FLOAT].count(op) == 1


# ---- GradScaler ----


def parameter(*values):
    return Tensor(np.array(values, SINGLE), requires_grad=True)


def step(scaler, optimizer, p, *gradient):
    """One step with this gradient of the loss; returns p afterwards."""
    optimizer.zero_grad()
    with np.errstate(invalid="ignore"):  # 0 * inf
        scaler.scale((p * Tensor(np.array(gradient, SINGLE))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return p.data.tolist()


def test_the_scale_grows_after_good_steps_and_a_bad_one_is_skipped():
    p = parameter(0.0, 0.0)
    optimizer = optim.SGD([p], lr=1.0)
    scaler = GradScaler(
        init_scale=4.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2
    )
    scales, at = [scaler.get_scale()], []
    for g in (1.0, 1.0, np.inf, 1.0, np.nan, 1.0, 1.0, 1.0, 1.0):
        at.append(step(scaler, optimizer, p, 1.0, g))
        scales.append(scaler.get_scale())
    # 2 good: x 3; bad: / 4; 1 good, then a bad one, which starts the count anew
    assert scales == [4, 4, 12, 3, 3, 0.75, 0.75, 2.25, 2.25, 6.75]
    assert [x for x, _ in at] == [-1, -2, -2, -3, -3, -4, -5, -6, -7]


def test_gradients_are_unscaled_in_place_once():
    p = parameter(1.0)
    optimizer = optim.SGD([p], lr=1.0)
    scaler = GradScaler()
    loss = (p * 3).sum()
    assert scaler.scale(loss).item() == 3 * 2**16
    scaler.scale(loss).backward()
    array = p.grad.data
    scaler.unscale_(optimizer)
    assert p.grad.data is array
    assert p.grad.item() == 3
    nn.utils.clip_grad_norm_([p], 1.0)
    scaler.step(optimizer)
    assert p.item() == pytest.approx(0, abs=1e-5)


def test_losses_in_lists_are_scaled_and_half_precision_does_not_overflow():
    scaler = GradScaler(init_scale=2.0**20)
    losses = scaler.scale([Tensor(np.float16(1)), Tensor(np.float64(2))])
    assert [loss.item() for loss in losses] == [2**20, 2**21]
    assert [str(loss.dtype) for loss in losses] == ["float32", "float64"]


def test_two_optimizers_skip_for_themselves_and_share_the_scale():
    p, q = parameter(0.0), parameter(0.0)
    scaler = GradScaler(init_scale=2.0)
    first, second = optim.SGD([p], lr=1.0), optim.SGD([q], lr=1.0)
    p.grad, q.grad = Tensor(np.ones(1, SINGLE)), Tensor(np.full(1, np.inf, SINGLE))
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (p.item(), q.item()) == (-0.5, 0)
    assert scaler.get_scale() == 1.0


def test_a_disabled_scaler_does_nothing():
    p = parameter(0.0)
    optimizer = optim.SGD([p], lr=1.0)
    scaler = GradScaler(enabled=False)
    loss = (p * 2).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == -2
    assert (scaler.get_scale(), scaler.is_enabled()) == (1.0, False)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


def test_a_loaded_scaler_goes_on():
    p = parameter(0.0)
    optimizer = optim.SGD([p], lr=1.0)
    scaler = GradScaler(init_scale=8.0, growth_interval=3)
    step(scaler, optimizer, p, 1.0)
    step(scaler, optimizer, p, 1.0)
    file = io.BytesIO()
    minddp.save(scaler.state_dict(), file)
    file.seek(0)
    other = GradScaler()
    other.load_state_dict(minddp.load(file))
    assert other.get_scale() == 8
    step(other, optimizer, p, 1.0)
    assert other.get_scale() == 16
    with pytest.raises(UsageError, match="disabled"):
        other.load_state_dict({})
    assert other.get_scale() == 16


def test_the_scale_can_be_set():
    scaler = GradScaler()
    scaler.update(128.0)
    assert scaler.get_scale() == 128


def test_training_in_half_precision_learns_what_single_precision_does():
    """With gradients so small that float16 alone would lose them all."""
    x, target = tensor(64, 8), tensor(64, 1, seed=1)

    def train(dtype, scaler):
        minddp.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = optim.SGD(model.parameters(), lr=5e4)
        for _ in range(60):
            optimizer.zero_grad()
            with autocast("cpu", dtype=dtype):
                loss = F.mse_loss(model(x), target) * 1e-6
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return loss.item() * 1e6

    exact = train("float32", GradScaler(enabled=False))
    scaled = train("float16", GradScaler(init_scale=2.0**20))
    lost = train("float16", GradScaler(enabled=False))
    assert scaled == pytest.approx(exact, rel=0.02)
    assert lost > 1.1 * exact


# ---- Ranks ----


def test_under_ddp_one_rank_overflows_and_all_skip_without_a_word():
    def body(pg):
        minddp.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(2, 1), pg)
        optimizer = optim.SGD(ddp.parameters(), lr=0.1)
        scaler, seen = GradScaler(init_scale=16.0), []
        for i in range(3):
            x = np.ones((1, 2), SINGLE) * (pg.rank + 1)
            if i == pg.rank == 1:
                x[0, 0] = np.inf
            optimizer.zero_grad()
            with np.errstate(invalid="ignore"):
                scaler.scale(ddp(x).sum()).backward()
            before = pg.stats()["collectives"]
            scaler.step(optimizer)
            scaler.update()
            assert pg.stats()["collectives"] == before, "nobody was asked"
            seen.append((scaler.get_scale(), ddp.module.weight.data.tobytes()))
        return seen

    first, second = run_groups(2, body)
    assert first == second
    assert [scale for scale, _ in first] == [16, 8, 8]
    assert first[0][1] == first[1][1] != first[2][1]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_without_ddp_a_process_group_makes_all_skip(bad):
    def body(pg, ask=True):
        p = parameter(0.0)
        optimizer = optim.SGD([p], lr=1.0)
        scaler = GradScaler(init_scale=2.0, process_group=pg if ask else None)
        g = np.inf if pg.rank == bad else 1.0
        return step(scaler, optimizer, p, g), scaler.get_scale()

    assert run_groups(3, body) == [([0], 1.0)] * 3
    alone = run_groups(3, lambda pg: body(pg, ask=False))
    assert [scale for _, scale in alone].count(1.0) == 1, "and without, one alone"


# ---- Refusals ----


def with_gradient(dtype=SINGLE):
    p = Tensor(np.ones(1, dtype), requires_grad=True)
    p.grad = Tensor(np.ones(1, dtype))
    return optim.SGD([p], lr=1.0)


def twice(first, second):
    def call(scaler):
        optimizer = with_gradient()
        getattr(scaler, first)(optimizer)
        getattr(scaler, second)(optimizer)

    return call


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (twice("unscale_", "unscale_"), "unscaled already"),
        (twice("step", "unscale_"), "unscaled already"),
        (twice("step", "step"), "without update"),
        (lambda scaler: scaler.update(), "before step"),
        (lambda scaler: scaler.step(with_gradient(HALF)), "float16"),
        (lambda scaler: scaler.step(optim.SGD([parameter(1.0)])), "no gradient"),
        (lambda scaler: scaler.load_state_dict({"scale": 1.0}), "load_state_dict"),
        (lambda scaler: GradScaler(65536.0), "init_scale="),
        (lambda scaler: GradScaler(init_scale=0), "init_scale"),
        (lambda scaler: GradScaler(growth_factor=1.0), "growth_factor"),
        (lambda scaler: GradScaler(backoff_factor=1.0), "backoff_factor"),
        (lambda scaler: autocast("tpu"), "device_type"),
        (lambda scaler: autocast("cpu", dtype="int8"), "dtype"),
        (lambda scaler: autocast("cpu", dtype=np.float64), "dtype"),
    ],
)
def test_what_cannot_be_is_refused(call, match):
    with pytest.raises(UsageError, match=match):
        call(GradScaler())
