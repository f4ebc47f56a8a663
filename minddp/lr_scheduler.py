"""Learning-rate schedules: how long a step may be, as training goes on.

    for epoch in range(epochs):
        train one epoch              optimizer.step(), optimizer.step(), ...
        scheduler.step()             writes a new lr into optimizer.param_groups

    StepLR                 lr times gamma every step_size epochs
    MultiStepLR            lr times gamma at each milestone
    ExponentialLR          lr times gamma in every epoch
    LambdaLR               the first lr times a function of the epoch
    LinearLR               lr along a line, from a fraction of it up (or down)
    CosineAnnealingLR      lr down half a cosine wave
    CosineAnnealingWarmRestarts    the same again and again, in longer and longer waves
    SequentialLR           one schedule after the other
    ReduceLROnPlateau      lr times factor when a metric has stopped to get better

"Epoch" is what PyTorch calls the count of `scheduler.step()`. It may as well be called
after every batch: then all lengths are numbers of batches.

Rule.  An lr depends on how often `step` was called, on nothing else. Ranks take equally
many steps, so they agree on the lr without a word; the schedule is saved by all or by
rank 0, and loaded by all. ReduceLROnPlateau is the exception. Its metric is an input,
and ranks that have measured different losses would go on with different lrs, that is,
with replicas that drift apart: all-reduce the metric first.

Worked example, warm-up and cosine, lr = 0.1:

    warmup = LinearLR(optimizer, start_factor=0.25, total_iters=3)
    cosine = CosineAnnealingLR(optimizer, T_max=4)
    scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[3])

    epoch   0      1      2      3      4      5      6      7
    lr      0.025  0.05   0.075  0.1    0.0854 0.05   0.0146 0
            '---- warm-up -----' '---------- cosine --------'

Invariants.
1.  The first lr of a group stays in it as "initial_lr", so a schedule can be made anew
    for an optimizer that was loaded: `last_epoch` says where.
2.  Most rules (`get_lr`) say what an epoch does to the lr that is there. Two schedules
    of one optimizer, stepped one after the other, therefore multiply.

In PyTorch: torch/optim/lr_scheduler.py, the same names, rules and attributes. A
subclass of `LRScheduler` defines `get_lr`.

Left out:
- `step(epoch)`, except for warm restarts, where a fraction of an epoch makes sense;
- ConstantLR, PolynomialLR, CyclicLR, OneCycleLR, MultiplicativeLR, ChainedScheduler.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from minddp.errors import UsageError


class LRScheduler:
    """What all schedules share: where they are, and the lr of each group there.

    optimizer: has `param_groups`, a list of dicts with an "lr". last_epoch: the last
    one that is over, -1 for a new training.

    Raises UsageError if training is to go on, but a group has no "initial_lr".
    """

    def __init__(self, optimizer: Any, last_epoch: int = -1):
        name = type(self).__name__
        for i, group in enumerate(_groups(name, optimizer)):
            if last_epoch == -1:
                group.setdefault("initial_lr", group["lr"])
            elif "initial_lr" not in group:
                raise UsageError(
                    f"{name}(last_epoch={last_epoch}): group {i} of the optimizer has "
                    "no 'initial_lr'. Load its saved state first, or start at -1."
                )
        self.optimizer = optimizer
        self.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        self.last_epoch = last_epoch
        self.step()

    def get_lr(self) -> Sequence[float]:
        """The lr of each group in epoch `last_epoch`; there is still that before it."""
        raise UsageError(f"{type(self).__name__} does not define get_lr")

    def get_last_lr(self) -> list[float]:
        """The lr of each group, as the last step has set it."""
        return self._last_lr

    def step(self) -> None:
        """Begin the next epoch."""
        self.last_epoch += 1
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
        self._last_lr = self._lrs()

    def _lrs(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _restart(self) -> None:
        """Begin epoch 0, from the first lr."""
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr
        self.last_epoch = -1
        self.step()

    def state_dict(self) -> dict[str, Any]:
        """All attributes, for a checkpoint; neither the optimizer nor functions."""
        return {name: x for name, x in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved. The lr itself is in the optimizer's state.

        Raises UsageError if it is not of such a schedule; then nothing was loaded.
        """
        self._check(state)
        vars(self).update(state)

    def _check(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            given = list(state) if isinstance(state, Mapping) else state
            raise UsageError(
                f"load_state_dict: a {type(self).__name__} has saved {list(own)}, this "
                f"is {given}"
            )


_LRScheduler = LRScheduler  # the name it had first, which scripts inherit from


class StepLR(LRScheduler):
    """lr times gamma every step_size epochs."""

    def __init__(
        self, optimizer: Any, step_size: int, gamma: float = 0.1, last_epoch: int = -1
    ):
        self.step_size, self.gamma = _count("StepLR: step_size", step_size), gamma
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> Sequence[float]:
        due = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return [lr * self.gamma if due else lr for lr in self._lrs()]


class MultiStepLR(LRScheduler):
    """lr times gamma at each milestone, at one that is listed twice gamma^2."""

    def __init__(
        self,
        optimizer: Any,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
    ):
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> Sequence[float]:
        factor = self.gamma ** self.milestones.count(self.last_epoch)
        return [lr * factor for lr in self._lrs()]


class ExponentialLR(LRScheduler):
    """lr times gamma in every epoch."""

    def __init__(self, optimizer: Any, gamma: float, last_epoch: int = -1):
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> Sequence[float]:
        return [lr * self.gamma if self.last_epoch else lr for lr in self._lrs()]


class LambdaLR(LRScheduler):
    """The first lr times lr_lambda(epoch); a list has a function for each group.

    The functions are not saved: give the same when you load.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ):
        groups = len(_groups("LambdaLR", optimizer))
        if callable(lr_lambda):
            lr_lambda = [lr_lambda] * groups
        if len(lr_lambda) != groups:
            raise UsageError(
                f"LambdaLR: {len(lr_lambda)} functions for {groups} parameter groups"
            )
        self.lr_lambdas = list(lr_lambda)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> Sequence[float]:
        pairs = zip(self.base_lrs, self.lr_lambdas, strict=True)
        return [lr * factor(self.last_epoch) for lr, factor in pairs]

    def state_dict(self) -> dict[str, Any]:
        return {k: x for k, x in super().state_dict().items() if k != "lr_lambdas"}


class LinearLR(LRScheduler):
    """lr times a factor that goes from start_factor to end_factor in total_iters."""

    def __init__(
        self,
        optimizer: Any,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ):
        if not 0 < start_factor <= 1 or not 0 <= end_factor <= 1:
            raise UsageError(
                "LinearLR: start_factor is in (0, 1] and end_factor in [0, 1], not "
                f"{start_factor} and {end_factor}"
            )
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_iters = _count("LinearLR: total_iters", total_iters)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> Sequence[float]:
        t = self.last_epoch
        if t > self.total_iters:
            return self._lrs()
        before = self._factor(t - 1) if t else 1.0
        return [lr * self._factor(t) / before for lr in self._lrs()]

    def _factor(self, t: int) -> float:
        way = self.end_factor - self.start_factor
        return self.start_factor + way * t / self.total_iters


class CosineAnnealingLR(LRScheduler):
    """From the first lr to eta_min along half a cosine wave, in T_max epochs.

        lr = eta_min + (first lr - eta_min) (1 + cos(pi t / T_max)) / 2

    After T_max it comes up again on the other half.      [Loshchilov & Hutter 2017]
    """

    def __init__(
        self, optimizer: Any, T_max: int, eta_min: float = 0.0, last_epoch: int = -1
    ):
        self.T_max, self.eta_min = _count("CosineAnnealingLR: T_max", T_max), eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> Sequence[float]:
        t, bottom = self.last_epoch, self.eta_min
        height = _wave(t / self.T_max)
        if t == 0:
            return self._lrs()
        if (t - 1) % (2 * self.T_max) == self.T_max:  # the height before was 0
            return [bottom + (lr - bottom) * height for lr in self.base_lrs]
        ratio = height / _wave((t - 1) / self.T_max)
        return [bottom + (lr - bottom) * ratio for lr in self._lrs()]


class CosineAnnealingWarmRestarts(LRScheduler):
    """Half a cosine wave of T_0 epochs, then from the top again, T_mult times as long.

    In PyTorch it can also be stepped after every batch, by step(epoch + i / batches).
    """

    def __init__(
        self,
        optimizer: Any,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ):
        self.T_0 = self.T_i = _count("CosineAnnealingWarmRestarts: T_0", T_0)
        self.T_mult = _count("CosineAnnealingWarmRestarts: T_mult", T_mult)
        self.T_cur: float = 0
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> Sequence[float]:
        height = _wave(self.T_cur / self.T_i)
        return [self.eta_min + (lr - self.eta_min) * height for lr in self.base_lrs]

    def step(self, epoch: float | None = None) -> None:
        """Begin the next epoch, or be in this one, which may be a fraction."""
        at = self.last_epoch + 1 if epoch is None else epoch
        if at < 0:
            raise UsageError(f"CosineAnnealingWarmRestarts: no epoch {epoch}")
        self.T_cur, self.T_i = at, self.T_0
        if self.T_mult == 1:
            self.T_cur %= self.T_0
        while self.T_cur >= self.T_i:
            self.T_cur -= self.T_i
            self.T_i *= self.T_mult
        self.last_epoch = math.floor(at) - 1
        super().step()


class SequentialLR(LRScheduler):
    """schedulers[i] from milestones[i - 1] on, where it begins with its epoch 0."""

    def __init__(
        self,
        optimizer: Any,
        schedulers: Sequence[LRScheduler],
        milestones: Sequence[int],
        last_epoch: int = -1,
    ):
        if len(milestones) != len(schedulers) - 1:
            raise UsageError(
                f"SequentialLR: {len(schedulers)} schedules take one milestone less, "
                f"not {len(milestones)}"
            )
        for s in schedulers:
            if s.optimizer is not optimizer or isinstance(s, ReduceLROnPlateau):
                raise UsageError(
                    f"SequentialLR: this {type(s).__name__} is of another optimizer, "
                    "or goes by a metric, which SequentialLR does not have"
                )
        self._schedulers, self._milestones = list(schedulers), list(milestones)
        super().__init__(optimizer, last_epoch)

    def step(self) -> None:
        """Begin the next epoch."""
        self.last_epoch += 1
        i = bisect_right(self._milestones, self.last_epoch)
        if self.last_epoch == (0, *self._milestones)[i]:
            self._schedulers[i]._restart()
        else:
            self._schedulers[i].step()
        self._last_lr = self._schedulers[i].get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        inner = [scheduler.state_dict() for scheduler in self._schedulers]
        return {**super().state_dict(), "_schedulers": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check(state)
        for scheduler, inner in zip(
            self._schedulers, state["_schedulers"], strict=True
        ):
            scheduler.load_state_dict(inner)
        vars(self).update({**state, "_schedulers": self._schedulers})

    def _check(self, state: Mapping[str, Any]) -> None:
        super()._check(state)
        here, there = len(self._schedulers), len(state["_schedulers"])
        if here != there:
            raise UsageError(
                f"load_state_dict: {there} schedules were saved, not {here}"
            )
        for scheduler, inner in zip(
            self._schedulers, state["_schedulers"], strict=True
        ):
            scheduler._check(inner)


class ReduceLROnPlateau(LRScheduler):
    """lr times factor once a metric has not got better for `patience` epochs.

    mode: "min" if less is better, "max" if more is. threshold: what counts as better,
    as a part of the best ("rel") or as a number ("abs"). cooldown: epochs after a
    reduction in which nothing is counted. min_lr: of all groups, or one for each. eps:
    a smaller change of the lr is not made.

        loss = np.array([...]); pg.all_reduce(loss, "avg"); scheduler.step(loss[0])
    """

    def __init__(
        self,
        optimizer: Any,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: Any = 0.0,
        eps: float = 1e-8,
    ):
        if not factor < 1 or mode not in ("min", "max"):
            raise UsageError(
                "ReduceLROnPlateau: factor is below 1 and mode 'min' or 'max', not "
                f"{factor} and {mode!r}"
            )
        if threshold_mode not in ("rel", "abs"):
            raise UsageError(
                f"ReduceLROnPlateau: no threshold_mode {threshold_mode!r}: 'rel', 'abs'"
            )
        self.optimizer = optimizer
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.eps = cooldown, eps
        groups = len(_groups("ReduceLROnPlateau", optimizer))
        self.min_lrs = [min_lr] * groups if isinstance(min_lr, Real) else list(min_lr)
        if len(self.min_lrs) != groups:
            raise UsageError(
                f"ReduceLROnPlateau: {len(self.min_lrs)} min_lr for {groups} groups"
            )
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = self.last_epoch = 0
        self._last_lr = self._lrs()

    def step(self, metrics: Any) -> None:  # type: ignore[override]
        """An epoch is over, and this is its metric: a number, the same on all ranks."""
        metric = float(metrics)
        self.last_epoch += 1
        self.num_bad_epochs += 1
        if self._is_better(metric):
            self.best, self.num_bad_epochs = metric, 0
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            self._reduce()
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = self._lrs()

    def _is_better(self, metric: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        if self.threshold_mode == "abs":
            return sign * (metric - self.best) > self.threshold
        return sign * (metric - self.best * (1 + sign * self.threshold)) > 0

    def _reduce(self) -> None:
        pairs = zip(self.optimizer.param_groups, self.min_lrs, strict=True)
        for group, least in pairs:
            lr = max(group["lr"] * self.factor, least)
            if group["lr"] - lr > self.eps:
                group["lr"] = lr


def _groups(name: str, optimizer: Any) -> list[dict[str, Any]]:
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(f"{name}: {optimizer!r} is no optimizer")
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def _wave(way: float) -> float:
    """Half a cosine wave: 1 at way = 0, 0 at 1."""
    return (1 + math.cos(math.pi * way)) / 2


def _count(what: str, n: int) -> int:
    try:
        number = operator.index(n)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"{what} must be a whole number, 1 or more, not {n!r}")
    return number
