"""Learning-rate schedules, against their closed formulas over 50 epochs."""

import io
import math

import numpy as np
import pytest

import minddp
from minddp import optim
from minddp.autograd import Tensor
from minddp.errors import UsageError
from minddp.optim import lr_scheduler as S
from minddp.testing import run_groups

EPOCHS = 50


def optimizer(*lrs):
    """With a parameter group for each lr."""
    parameters = [Tensor(np.ones(1), requires_grad=True) for _ in lrs]
    return optim.SGD(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters, lrs, strict=True)]
    )


def lr_of(o):
    return o.param_groups[0]["lr"]


def followed(make, epochs=EPOCHS, base=0.1):
    """The lr of each epoch."""
    o = optimizer(base)
    scheduler = make(o)
    lrs = []
    for _ in range(epochs):
        lrs.append(lr_of(o))
        assert scheduler.get_last_lr() == [lr_of(o)]
        scheduler.step()
    return lrs


def cosine(t, length, low=0.0):
    return low + (0.1 - low) * (1 + math.cos(math.pi * t / length)) / 2


def restarted(t, length, growth):
    while t >= length:
        t, length = t - length, length * growth
    return cosine(t, length)


SCHEDULES = {
    "step": (lambda o: S.StepLR(o, 7, 0.3), lambda t: 0.1 * 0.3 ** (t // 7)),
    "multi-step": (
        lambda o: S.MultiStepLR(o, [30, 10, 10], 0.5),
        lambda t: 0.1 * 0.5 ** (2 * (t >= 10) + (t >= 30)),
    ),
    "exponential": (lambda o: S.ExponentialLR(o, 0.93), lambda t: 0.1 * 0.93**t),
    "lambda": (lambda o: S.LambdaLR(o, lambda t: 1 / (1 + t)), lambda t: 0.1 / (1 + t)),
    "linear": (
        lambda o: S.LinearLR(o, 0.2, 0.8, total_iters=12),
        lambda t: 0.1 * (0.2 + 0.6 * min(t, 12) / 12),
    ),
    "linear, as PyTorch has it": (
        lambda o: S.LinearLR(o),
        lambda t: 0.1 * (1 / 3 + 2 / 3 * min(t, 5) / 5),
    ),
    "linear, down to 0": (
        lambda o: S.LinearLR(o, 1.0, 0.0, total_iters=10),
        lambda t: 0.1 * (1 - min(t, 10) / 10),
    ),
    "cosine": (lambda o: S.CosineAnnealingLR(o, 50), lambda t: cosine(t, 50)),
    "cosine, down, up and down": (
        lambda o: S.CosineAnnealingLR(o, 9, eta_min=0.001),
        lambda t: cosine(t, 9, 0.001),
    ),
    "cosine, one epoch": (
        lambda o: S.CosineAnnealingLR(o, 1),
        lambda t: 0.1 * (t % 2 == 0),
    ),
    "warm restarts": (
        lambda o: S.CosineAnnealingWarmRestarts(o, 5, 2),
        lambda t: restarted(t, 5, 2),
    ),
    "warm restarts, of one length": (
        lambda o: S.CosineAnnealingWarmRestarts(o, 7),
        lambda t: restarted(t, 7, 1),
    ),
    "warm-up and cosine": (
        lambda o: S.SequentialLR(
            o, [S.LinearLR(o, 0.1, 1.0, 5), S.CosineAnnealingLR(o, 40)], [5]
        ),
        lambda t: 0.1 * (0.1 + 0.9 * t / 5) if t < 5 else cosine(t - 5, 40),
    ),
    "three in a row": (
        lambda o: S.SequentialLR(
            o,
            [S.ExponentialLR(o, 0.9), S.StepLR(o, 4, 0.5), S.LinearLR(o, 0.5, 1, 10)],
            [12, 30],
        ),
        lambda t: (
            0.1 * 0.9**t
            if t < 12
            else 0.1 * 0.5 ** ((t - 12) // 4)
            if t < 30
            else 0.1 * (0.5 + 0.5 * min(t - 30, 10) / 10)
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_follows_its_formula(name):
    make, formula = SCHEDULES[name]
    expected = [formula(t) for t in range(EPOCHS)]
    np.testing.assert_allclose(followed(make), expected, rtol=1e-12, atol=1e-15)


def test_the_lesson_of_the_module_is_true():
    def make(o):
        warmup = S.LinearLR(o, start_factor=0.25, total_iters=3)
        return S.SequentialLR(o, [warmup, S.CosineAnnealingLR(o, T_max=4)], [3])

    table = [0.025, 0.05, 0.075, 0.1, 0.0854, 0.05, 0.0146, 0]
    assert [round(lr, 4) for lr in followed(make, 8)] == table


def test_each_group_has_its_own_lr():
    o = optimizer(1.0, 0.1)
    scheduler = S.LambdaLR(o, [lambda t: 0.5**t, lambda t: 1.0])
    scheduler.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25, 0.1]
    o = optimizer(1.0, 0.1)
    scheduler = S.CosineAnnealingLR(o, 2)
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.5, 0.05])


def test_two_schedules_of_one_optimizer_multiply():
    o = optimizer(0.1)
    both = S.ExponentialLR(o, 0.9), S.MultiStepLR(o, [2, 4])
    for t in range(6):
        assert lr_of(o) == pytest.approx(0.1 * 0.9**t * 0.1 ** ((t >= 2) + (t >= 4)))
        for scheduler in both:
            scheduler.step()


def test_a_warm_up_can_be_stepped_beside_a_cosine():
    o = optimizer(0.1)
    both = S.LinearLR(o, 0.1, 1.0, 5), S.CosineAnnealingLR(o, 20)
    for t in range(20):
        assert lr_of(o) == pytest.approx((0.1 + 0.9 * min(t, 5) / 5) * cosine(t, 20))
        for scheduler in both:
            scheduler.step()


def test_warm_restarts_can_be_stepped_by_fractions_of_an_epoch():
    o = optimizer(0.1)
    scheduler = S.CosineAnnealingWarmRestarts(o, 5, 3)
    for t in np.arange(0, 40, 0.37):
        scheduler.step(float(t))
        assert lr_of(o) == pytest.approx(restarted(t, 5, 3))
        assert scheduler.last_epoch == int(t)
    scheduler.step()
    assert lr_of(o) == pytest.approx(restarted(40, 5, 3))


# ---- A metric that has stopped to get better ----


def test_a_plateau_reduces_the_lr_after_patience_epochs():
    o = optimizer(0.1)
    scheduler = S.ReduceLROnPlateau(o, factor=0.5, patience=2)
    lrs = []
    for loss in (5, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3):
        scheduler.step(Tensor(np.float32(loss)))
        lrs.append(lr_of(o))
    assert lrs == [0.1] * 4 + [0.05] * 4 + [0.025] * 3
    assert scheduler.get_last_lr() == [0.025]


@pytest.mark.parametrize(
    ("settings", "metrics", "better"),
    [
        ({"threshold": 0.1}, [10, 9.01], False),
        ({"threshold": 0.1}, [10, 8.99], True),
        ({"threshold": 0.1, "mode": "max"}, [10, 10.99], False),
        ({"threshold": 0.1, "mode": "max"}, [10, 11.01], True),
        ({"threshold": 0.1, "threshold_mode": "abs"}, [10, 9.91], False),
        ({"threshold": 0.1, "threshold_mode": "abs"}, [10, 9.89], True),
        ({"threshold": 0.1, "threshold_mode": "abs", "mode": "max"}, [1, 1.2], True),
        ({}, [10, float("nan")], False),
    ],
)
def test_what_counts_as_better(settings, metrics, better):
    o = optimizer(0.1)
    scheduler = S.ReduceLROnPlateau(o, patience=0, **settings)
    for metric in metrics:
        scheduler.step(metric)
    assert (lr_of(o) == 0.1) == better


def test_after_a_reduction_comes_a_cooldown_and_no_group_goes_below_its_least_lr():
    o = optimizer(0.1, 0.1)
    scheduler = S.ReduceLROnPlateau(
        o, factor=0.1, patience=0, cooldown=2, min_lr=[0.004, 0]
    )
    lrs = []
    for _ in range(9):
        scheduler.step(1.0)
        lrs.append([round(group["lr"], 9) for group in o.param_groups])
    first, second = [0.1, 0.1], [0.01, 0.01]
    assert lrs == [first] + [second] * 3 + [[0.004, 0.001]] * 3 + [[0.004, 0.0001]] * 2


# ---- Saving and loading ----


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loaded_schedule_goes_on_as_if_nothing_had_happened(name):
    make, formula = SCHEDULES[name]
    first = optimizer(0.1)
    scheduler = make(first)
    for _ in range(17):
        scheduler.step()
    file = io.BytesIO()
    minddp.save({"schedule": scheduler.state_dict(), "sgd": first.state_dict()}, file)
    file.seek(0)
    saved = minddp.load(file)

    second = optimizer(0.1)
    scheduler = make(second)
    second.load_state_dict(saved["sgd"])
    scheduler.load_state_dict(saved["schedule"])
    for t in range(17, EPOCHS):
        assert lr_of(second) == pytest.approx(formula(t), rel=1e-12, abs=1e-15)
        assert scheduler.get_last_lr() == [lr_of(second)]
        scheduler.step()


def test_a_loaded_plateau_remembers_the_best_and_its_patience():
    def run(scheduler, losses):
        for loss in losses:
            scheduler.step(loss)

    losses = [3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1]
    whole, half, rest = optimizer(0.1), optimizer(0.1), optimizer(0.1)
    run(S.ReduceLROnPlateau(whole, patience=3), losses)
    scheduler = S.ReduceLROnPlateau(half, patience=3)
    run(scheduler, losses[:4])
    other = S.ReduceLROnPlateau(rest, patience=3)
    other.load_state_dict(scheduler.state_dict())
    run(other, losses[4:])
    assert lr_of(whole) == lr_of(rest) != 0.1


def test_a_schedule_can_begin_where_a_loaded_optimizer_ended():
    first = optimizer(0.1)
    scheduler = S.CosineAnnealingLR(first, 20)
    for _ in range(10):
        scheduler.step()
    second = optimizer(0.5)
    second.load_state_dict(first.state_dict())
    S.CosineAnnealingLR(second, 20, last_epoch=scheduler.last_epoch)
    assert lr_of(second) == pytest.approx(cosine(11, 20))


def test_the_state_of_another_schedule_is_refused_and_nothing_is_loaded():
    o = optimizer(0.1)
    step = S.StepLR(o, 5)
    row = S.SequentialLR(o, [S.StepLR(o, 5), S.ExponentialLR(o, 0.5)], [3])
    spoiled = row.state_dict()
    spoiled["_schedulers"] = spoiled["_schedulers"][::-1]
    short = {**row.state_dict(), "_schedulers": []}
    half = row.state_dict()
    half["_schedulers"] = [{**half["_schedulers"][0], "last_epoch": 9}, {}]
    for scheduler, state in (
        (step, S.ExponentialLR(o, 0.5).state_dict()),
        (step, {}),
        (step, None),
        (row, spoiled),
        (row, short),
        (row, half),
    ):
        before = scheduler.state_dict()
        with pytest.raises(UsageError, match="load_state_dict"):
            scheduler.load_state_dict(state)
        assert scheduler.state_dict() == before


# ---- For subclasses, and among ranks ----


def test_a_schedule_of_ones_own_defines_get_lr():
    class Noam(S._LRScheduler):
        def get_lr(self):
            t = self.last_epoch + 1
            return [lr * min(t**-0.5, t * 10**-1.5) for lr in self.base_lrs]

    expected = [0.1 * min(t**-0.5, t * 10**-1.5) for t in range(1, 31)]
    np.testing.assert_allclose(followed(Noam, 30), expected)


def test_an_optimizer_steps_by_the_lr_of_the_schedule():
    p = Tensor(np.zeros(1), requires_grad=True)
    o = optim.SGD([p], lr=1.0)
    scheduler = S.ExponentialLR(o, 0.5)
    for _ in range(3):
        p.grad = Tensor(np.ones(1))
        o.step()
        scheduler.step()
    assert p.item() == -1.75


def test_ranks_agree_because_they_count_alike_and_on_a_plateau_by_one_metric():
    losses = {0: [3, 2, 1, 1, 1], 1: [3, 3, 3, 3, 3]}

    def body(pg):
        o, own = optimizer(0.1), optimizer(0.1)
        together, alone = (
            S.ReduceLROnPlateau(x, factor=0.5, patience=1) for x in (o, own)
        )
        lrs = []
        for loss in losses[pg.rank]:
            mean = np.array([float(loss)])
            pg.all_reduce(mean, "avg")
            together.step(mean[0])
            alone.step(loss)
            lrs.append((lr_of(o), lr_of(own)))
        return lrs

    of_ranks = run_groups(2, body)
    agreed, apart = ([[pair[i] for pair in lrs] for lrs in of_ranks] for i in (0, 1))
    assert agreed[0] == agreed[1] == [0.1, 0.1, 0.1, 0.1, 0.05]
    assert apart[0] != apart[1]


# ---- Refusals ----


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda o: S.StepLR([1], 3), "no optimizer"),
        (lambda o: S.LambdaLR([1], lambda t: 1.0), "no optimizer"),
        (lambda o: S.ReduceLROnPlateau([1]), "no optimizer"),
        (lambda o: S.StepLR(o, 0), "step_size"),
        (lambda o: S.StepLR(o, 2.5), "step_size"),
        (lambda o: S.CosineAnnealingLR(o, 0), "T_max"),
        (lambda o: S.CosineAnnealingWarmRestarts(o, 5, 0), "T_mult"),
        (lambda o: S.LinearLR(o, 0.0), "start_factor"),
        (lambda o: S.LinearLR(o, total_iters=0), "total_iters"),
        (lambda o: S.LambdaLR(o, [lambda t: 1.0] * 2), "2 functions for 1"),
        (lambda o: S.StepLR(o, 3, last_epoch=4), "initial_lr"),
        (lambda o: S.SequentialLR(o, [S.StepLR(o, 3)], [3]), "milestone"),
        (lambda o: S.SequentialLR(o, [S.StepLR(optimizer(1.0), 3)], []), "another"),
        (lambda o: S.SequentialLR(o, [S.ReduceLROnPlateau(o)], []), "metric"),
        (lambda o: S.ReduceLROnPlateau(o, "least"), "mode"),
        (lambda o: S.ReduceLROnPlateau(o, factor=1.0), "factor"),
        (lambda o: S.ReduceLROnPlateau(o, threshold_mode="all"), "threshold_mode"),
        (lambda o: S.ReduceLROnPlateau(o, min_lr=[0, 0]), "2 min_lr"),
        (lambda o: S.LRScheduler(o), "does not define get_lr"),
        (lambda o: S.CosineAnnealingWarmRestarts(o, 5).step(-1), "no epoch -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, match):
    with pytest.raises(UsageError, match=match):
        make(optimizer(0.1))
