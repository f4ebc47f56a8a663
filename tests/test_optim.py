"""Optimizers: the formulas, worked by hand, and the order of the parameters."""

import copy
import tracemalloc

import numpy as np
import pytest

from minddp import nn, optim
from minddp.autograd import Tensor
from minddp.errors import UsageError


def parameter(*values):
    return Tensor(np.array(values, "float64"), requires_grad=True)


def trajectory(optimizer, p, gradients):
    """The value of p[0] after each step with the given gradients."""
    values = []
    for g in gradients:
        p.grad = Tensor(np.full(p.shape, float(g)))
        optimizer.step()
        values.append(p.data.flat[0])
    return values


# ---- SGD, by hand; lr = 0.1 throughout ----


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-0.1, -0.2, -0.3]),
        ({"momentum": 0.9}, [-0.1, -0.29, -0.561]),
        # the first step is not dampened: v = g, then v = 0.9 v + 0.5 g
        ({"momentum": 0.9, "dampening": 0.5}, [-0.1, -0.24, -0.416]),
        # g + 0.9 v = 1.9, 2.71, 3.439
        ({"momentum": 0.9, "nesterov": True}, [-0.19, -0.461, -0.8049]),
        # g = 1 + p / 2 = 1, 0.95, 0.9025
        ({"weight_decay": 0.5}, [-0.1, -0.195, -0.28525]),
        # g = 1, 0.905, 0.778525; v = 1, 1.805, 2.403025
        (
            {"weight_decay": 0.5, "momentum": 0.9, "nesterov": True},
            [-0.19, -0.44295, -0.73707475],
        ),
        # g = 1, 0.95, 0.88125; v = 1, 1.375, 1.678125
        (
            {"weight_decay": 0.5, "momentum": 0.9, "dampening": 0.5},
            [-0.1, -0.2375, -0.4053125],
        ),
    ],
)
def test_sgd(settings, expected):
    p = parameter(0.0)
    optimizer = optim.SGD([p], lr=0.1, **settings)
    np.testing.assert_allclose(trajectory(optimizer, p, [1, 1, 1]), expected)


# ---- Adam ----


def reference_adam(p, gradients, lr, b1, b2, eps, weight_decay, decoupled):
    """The paper's algorithm 1 for a single number, with the two kinds of decay."""
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        if decoupled:
            p -= lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        p -= lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)) ** 0.5 + eps)
        yield p


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_adam_and_adamw_follow_the_papers(kind, weight_decay):
    p, gradients = parameter(1.0), [1, -2, 0.5, 3, 0]
    optimizer = kind([p], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=weight_decay)
    expected = list(
        reference_adam(
            1.0, gradients, 0.1, 0.8, 0.9, 1e-3, weight_decay, kind is optim.AdamW
        )
    )
    np.testing.assert_allclose(trajectory(optimizer, p, gradients), expected)


def test_adams_first_step_has_the_length_of_lr_whatever_the_gradient():
    for g in (1e-3, 1.0, 1e3):
        p = parameter(0.0)
        assert trajectory(optim.Adam([p], lr=0.1, eps=0), p, [g]) == [
            pytest.approx(-0.1)
        ]


# ---- What all optimizers promise ----

KINDS = [
    lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    lambda params: optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    lambda params: optim.Adam(params, lr=0.1, weight_decay=0.1),
    lambda params: optim.AdamW(params, lr=0.1),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_axes_moves_like_one_with_one_element(kind):
    """Arithmetic turns arrays without axes into scalars, which are read-only."""
    p, q = Tensor(np.array(1.0), requires_grad=True), parameter(1.0)
    of_p, of_q = kind([p]), kind([q])
    assert trajectory(of_p, p, [2, 2, -1, 2]) == trajectory(of_q, q, [2, 2, -1, 2])
    arrays = [v for v in of_p.state[p].values() if not isinstance(v, int)]
    assert arrays
    assert all(isinstance(v, np.ndarray) and v.shape == () for v in arrays)


def test_sgd_with_decay_accumulates_the_momentum_of_a_number():
    p = Tensor(np.float32(1), requires_grad=True)
    optimizer = optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1)
    assert trajectory(optimizer, p, [2] * 4)[-1] == pytest.approx(-0.871387)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_in_place_and_leave_the_gradient_alone(kind):
    p = Tensor(np.ones(3, "float32"), requires_grad=True)
    array = p.data
    g = np.ones(3, "float32")
    p.grad = Tensor(g)
    kind([p]).step()
    assert p.data is array
    assert array.dtype == np.float32
    assert (array != 1).all()
    assert (g == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_keeps_no_hold_of_the_gradient_array(kind):
    """Under DDP the next backward writes into the same array."""
    p, q, g = parameter(1.0), parameter(1.0), np.zeros(1)
    optimizer = kind([p])
    p.grad = Tensor(g)
    for value in (1.0, 5.0, 2.0):
        g[:] = value
        optimizer.step()
    assert p.item() == trajectory(kind([q]), q, [1, 5, 2])[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_gradient_are_skipped(kind):
    p, q = parameter(1.0), parameter(1.0)
    optimizer = kind([p, q])
    p.grad = Tensor(np.ones(1))
    optimizer.step()
    assert p.item() != 1
    assert q.item() == 1
    assert list(optimizer.state_dict()["state"]) == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_optimizer_continues_as_if_nothing_had_happened(kind):
    p, q = parameter(1.0), parameter(1.0)
    straight = kind([p])
    expected = trajectory(straight, p, [1, 2, 3, 4])

    first = kind([q])
    trajectory(first, q, [1, 2])
    saved = copy.deepcopy(first.state_dict())
    saved["state"] = {str(k): v for k, v in saved["state"].items()}  # as from JSON
    second = kind([q])
    second.load_state_dict(saved)
    assert trajectory(second, q, [3, 4]) == expected[2:]


# ---- Large parameters: block by block ----

LARGE = 2 * optim.BLOCK_BYTES // 8 + 5  # of float64: two blocks and a bit


def large(make, n=LARGE):
    """n numbers with a gradient each, from a seed, with an optimizer around them."""
    rng = np.random.default_rng(7)
    p = Tensor(rng.standard_normal(n), requires_grad=True)
    p.grad = Tensor(rng.standard_normal(n))
    return p, make([p])


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_parameter_moves_as_its_elements_would(kind):
    p, optimizer = large(kind)
    parts = [slice(0, 9), slice(LARGE // 2, LARGE // 2 + 9), slice(LARGE - 9, LARGE)]
    alone = [Tensor(p.data[part].copy(), requires_grad=True) for part in parts]
    of_parts = kind(alone)
    for _ in range(3):
        for q, part in zip(alone, parts, strict=True):
            q.grad = Tensor(p.grad.data[part])
        optimizer.step()
        of_parts.step()
        p.grad = Tensor(p.grad.data[::-1] * 2)
    for q, part in zip(alone, parts, strict=True):
        assert p.data[part].tobytes() == q.data.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_that_does_not_lie_in_one_piece_is_written_too(kind):
    p, optimizer = large(kind, 2 * LARGE)
    rows = p.data.reshape(2, LARGE)
    q = Tensor(rows.copy().T, requires_grad=True)  # columns that are apart in memory
    array = q.data
    other = kind([q])
    for _ in range(2):
        q.grad = Tensor(p.grad.data.reshape(2, LARGE).T.copy())
        optimizer.step()
        other.step()
    assert q.data is array
    assert (q.data == rows.T).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_only_read(kind):
    """In a bucket it lies beside others, and a compressing hook may look at it."""
    for n in (10, LARGE):
        p, optimizer = large(kind, n)
        p.grad.data.flags.writeable = False
        before = p.data.copy()
        optimizer.step()
        optimizer.step()
        assert (p.data != before).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_makes_no_array_as_large_as_a_parameter(kind):
    p, optimizer = large(kind, 8 * LARGE)
    optimizer.step()  # makes the state, and the scratch
    tracemalloc.start()
    optimizer.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < p.data.nbytes / 100


def test_parameters_of_all_dtypes_and_sizes_share_one_optimizer():
    """The scratch of one is not of the dtype or the shape of the next."""
    rng = np.random.default_rng(0)
    shapes = [("float32", 5), ("float64", LARGE), ("float32", LARGE), ("float64", 5)]
    ps = [Tensor(rng.standard_normal(n).astype(d), True) for d, n in shapes]
    qs = [Tensor(p.data.copy(), True) for p in ps]
    optimizers = [optim.AdamW(ps), *(optim.AdamW([q]) for q in qs)]
    for p, q in zip(ps, qs, strict=True):
        p.grad = q.grad = Tensor(rng.standard_normal(p.shape).astype(p.dtype))
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(ps, qs, strict=True):
        assert p.data.tobytes() == q.data.tobytes()
        assert p.dtype == q.dtype


def test_a_step_between_forward_and_backward_is_noticed():
    w = Tensor(np.ones(2), requires_grad=True)
    optimizer = optim.SGD([w], lr=0.1)
    w.grad = Tensor(np.ones(2))
    loss = (w * w).sum()
    optimizer.step()
    with pytest.raises(UsageError, match="modified in place"):
        loss.backward()


def test_an_lr_can_be_any_kind_of_number():
    for lr in (np.float32(0.5), np.array(0.5), 0.5):
        p = parameter(1.0)
        optimizer = optim.SGD([p], momentum=0.9)
        optimizer.param_groups[0]["lr"] = lr  # as a schedule of one's own may do it
        assert trajectory(optimizer, p, [1, 1]) == pytest.approx([0.5, -0.45])
        optimizer.param_groups[0]["lr"] = 2 * lr  # what was there before is not kept
        assert trajectory(optimizer, p, [1]) == pytest.approx([-0.45 - 2.71])


def test_loading_copies_and_checks():
    p = parameter(1.0)
    optimizer = optim.SGD([p], lr=0.1, momentum=0.9)
    trajectory(optimizer, p, [1])
    saved = optimizer.state_dict()
    other = optim.SGD([parameter(1.0)], lr=0.5)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1
    buffers = [
        next(iter(o.state.values()))["momentum_buffer"] for o in (optimizer, other)
    ]
    assert not np.shares_memory(*buffers)
    with pytest.raises(UsageError, match=r"\[2\].*\[1\]"):
        optim.SGD([parameter(1.0), parameter(2.0)]).load_state_dict(saved)


def changed(saved, *path, to):
    """A copy of the saved state with another value at that path."""
    saved = inner = copy.deepcopy(saved)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return saved


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda saved: {}, "no saved Adam"),
        (lambda saved: None, "no saved Adam"),
        (lambda saved: {**saved, "state": [1]}, "no saved Adam"),
        (lambda saved: {**saved, "param_groups": [{}]}, "no saved Adam"),
        (lambda saved: changed(saved, "state", 1, to={}), "no parameter 1"),
        (lambda saved: changed(saved, "state", -1, to={}), "no parameter -1"),
        (lambda saved: changed(saved, "state", 0, "exp_avg", to=np.ones(3)), "shapes"),
        (lambda saved: changed(saved, "state", 0, "exp_avg", to=1.0), "shapes"),
        (lambda saved: changed(saved, "state", 0, "exp_avg", to="ab"), "numbers"),
        (lambda saved: changed(saved, "state", 0, "exp_avg", to=[1j, 1]), "numbers"),
        (lambda saved: changed(saved, "state", 0, "step", to=np.ones(2)), "shapes"),
        (lambda saved: changed(saved, "state", 0, to={"step": 3}), "shapes"),
        (lambda saved: changed(saved, "param_groups", 0, "lr", to=None), "lr"),
        (lambda saved: changed(saved, "param_groups", 0, "betas", to=0.9), "betas"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(spoil, match):
    p = parameter(1.0, 2.0)
    optimizer = optim.Adam([p], lr=0.1)
    trajectory(optimizer, p, [1])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 5.0
    with pytest.raises(UsageError, match=match):
        optimizer.load_state_dict(spoil(saved))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[p]["exp_avg"].tolist() == pytest.approx([0.1, 0.1])
    trajectory(optimizer, p, [1])


def test_the_state_of_another_kind_of_optimizer_is_refused():
    p = parameter(1.0)
    sgd, adam = optim.SGD([p], momentum=0.9), optim.Adam([p])
    for optimizer in (sgd, adam):
        trajectory(optimizer, p, [1])
    with pytest.raises(UsageError, match=r"lack .*'betas'"):
        adam.load_state_dict(sgd.state_dict())
    with pytest.raises(UsageError, match=r"lack .*'momentum'"):
        sgd.load_state_dict(adam.state_dict())
    optim.AdamW([p]).load_state_dict(adam.state_dict())  # keeps the same


def test_a_loaded_array_takes_on_the_dtype_of_its_parameter():
    p, q = parameter(1.0), Tensor(np.ones(1, "float32"), requires_grad=True)
    first, second = optim.Adam([p]), optim.Adam([q])
    trajectory(first, p, [1])
    second.load_state_dict(first.state_dict())
    assert second.state[q]["exp_avg"].dtype == np.float32
    assert second.state[q]["step"] == 1


def test_groups_have_settings_of_their_own():
    p, q = parameter(0.0), parameter(0.0)
    optimizer = optim.SGD([{"params": [p], "lr": 1.0}, {"params": [q]}], lr=0.1)
    p.grad = q.grad = Tensor(np.ones(1))
    optimizer.step()
    assert (p.item(), q.item()) == (-1.0, -0.1)
    optimizer.param_groups[1]["lr"] = 10.0
    optimizer.step()
    assert (p.item(), q.item()) == (-2.0, -10.1)


def test_groups_as_gpt_scripts_make_them_decay_matrices_only():
    """Built as nanoGPT does, with fused and foreach, which change nothing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with_grad = [p for _, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in with_grad if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in with_grad if p.dim() < 2], "weight_decay": 0.0},
    ]
    before = {p: p.data.copy() for p in with_grad}
    optimizer = optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    for p in with_grad:
        p.grad = Tensor(np.zeros_like(p.data))
    optimizer.step()
    for p in with_grad:
        shrunk = 1 - 0.01 * 0.1 if p.dim() >= 2 else 1
        np.testing.assert_allclose(p.data, before[p] * shrunk, rtol=1e-6)
    for kind in (optim.SGD, optim.Adam, optim.AdamW):
        settings = kind(with_grad, lr=0.1, foreach=False, fused=None).param_groups[0]
        assert {"foreach", "fused"}.isdisjoint(settings)


def test_zero_grad_drops_gradients_or_clears_them_in_place():
    p = parameter(1.0)
    optimizer = optim.SGD([p])
    g = np.ones(1)
    p.grad = Tensor(g)
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.data is g
    assert g.tolist() == [0]
    optimizer.zero_grad()
    assert p.grad is None


def test_the_state_is_numbered_in_the_order_of_the_list():
    ps = [parameter(float(i)) for i in range(5)]
    optimizer = optim.SGD(iter(ps), momentum=0.9)
    for i, p in reversed(list(enumerate(ps))):
        p.grad = Tensor(np.full(1, 10.0 * i))
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [state[i]["momentum_buffer"].item() for i in range(5)] == [0, 10, 20, 30, 40]


# ---- Refusals ----


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: optim.SGD({p}), "order in each process"),
        (lambda p: optim.SGD([]), "empty"),
        (lambda p: optim.SGD(p), "single Tensor"),
        (lambda p: optim.SGD([p, p]), "twice"),
        (lambda p: optim.SGD([p * 2]), "leaf"),
        (lambda p: optim.SGD([p], lr=-0.1), "lr must be"),
        (lambda p: optim.SGD([p], lr=float("nan")), "lr must be"),
        (lambda p: optim.SGD([p], momentum=-1), "momentum must be"),
        (lambda p: optim.SGD([p], nesterov=True), "nesterov"),
        (lambda p: optim.Adam([p], betas=(0.9, 1.0)), "beta"),
        (lambda p: optim.AdamW([p], weight_decay=-1), "weight_decay"),
        (lambda p: optim.SGD([p], lr=None), "lr must be"),
        (lambda p: optim.Adam([p], lr="0.1"), "lr must be"),
        (lambda p: optim.SGD([p], momentum=None, nesterov=True), "momentum must be"),
        (lambda p: optim.SGD([{"params": [p], "nesterov": True}]), "nesterov"),
        (lambda p: optim.SGD([{"lr": 0.1}]), "'params'"),
        (lambda p: optim.SGD([{"params": [p]}, p]), "'params'"),
        (lambda p: optim.SGD([p, {"params": [p]}]), "no Tensor"),
        (lambda p: optim.SGD(None), "list"),
        (lambda p: optim.Adam([p], betas=0.9), "betas"),
        (lambda p: optim.Adam([p], betas=(0.9,)), "betas"),
        (lambda p: optim.Adam([p], betas=("a", "b")), "betas"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, match):
    with pytest.raises(UsageError, match=match):
        make(parameter(1.0))


def test_a_state_of_pytorchs_sgd_without_momentum_holds_nothing():
    p = nn.Parameter(np.ones(2))
    optimizer = optim.SGD([p], lr=0.1)
    state = optimizer.state_dict() | {"state": {0: {"momentum_buffer": None}}}
    optimizer.load_state_dict(state)
    p.grad = Tensor(np.ones(2))
    optimizer.step()
    assert p.tolist() == [0.9, 0.9]
