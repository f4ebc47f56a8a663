"""DDP: n replicas of a model, each trained on its own part of every batch.

    rank 0   part 0 --> replica --> loss --> gradient --.            .--> step
                                                        |-- average -|
    rank 1   part 1 --> replica --> loss --> gradient --'            '--> step

Why it works.  The gradient of a mean is the mean of the gradients. If every rank takes
the gradient of the mean loss of its own B examples, the average over n ranks is the
gradient of the mean loss of all n B examples: one process with the whole batch would
compute the same.

Rule 1.  Replicas start equal: rank 0's parameters and buffers are broadcast.
Rule 2.  Replicas take equal steps: before `backward` returns, every gradient has been
         overwritten with its average over the ranks, which has the same bits on all.
         So the optimizers, which never communicate, do the same everywhere.
Rule 3.  Order is the same on every rank: that of definition, or the one that rank 0
         has told. The k-th all-reduce of one rank meets the k-th of the others,
         whatever the two are about.

Worked example, n = 2: gradients 0.2 on rank 0 and 0.6 on rank 1 are 0.4 on both
afterwards. With lr = 0.1 both go down by 0.04.

First comes DDP as everybody writes it first: one all-reduce for each parameter, once
backward has ended. It is right, and it is slow in two ways which a profile shows at
once: a small parameter costs as many messages as a big one, and the network rests while
backward computes. It stays as the oracle of the second version, in which gradients
travel in buckets while backward still computes.

In PyTorch: `torch.nn.parallel.DistributedDataParallel` and its Reducer.

Left out: ranks with different numbers of batches (`join`). The naive version does not
compare the models (a parameter of another shape is a PeerMismatch from broadcast), and
gives a parameter that no rank uses a gradient of zeros, so that weight decay still
moves it.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minddp.autograd import (
    Tensor,
    backward_number,
    is_recording,
    leaves_behind,
    queue_callback,
)
from minddp.buckets import (
    BUCKET_CAP_MB,
    FIRST_BUCKET_BYTES,
    MIB,
    Bucket,
    Size,
    plan,
)
from minddp.comm_hooks import Hook, allreduce_hook
from minddp.errors import UsageError
from minddp.group import ProcessGroup
from minddp.nn import Module, Parameter
from minddp.replicas import check_sync, compare_models


class NaiveDistributedDataParallel(Module):
    """Wraps `module` so that `backward` leaves averaged gradients in its parameters.

    module: the same on all ranks, its parameters in the same order.

    After construction all ranks hold rank 0's values. The wrapped model is in
    `.module`. A parameter that this rank's loss does not depend on contributes zeros;
    the loss must depend on one at least.

    Raises: PeerError from construction and from `backward`; the group is dead
    afterwards.
    """

    def __init__(self, module: Module, process_group: ProcessGroup):
        self.module = module
        self.process_group = process_group
        for tensor in [*module.parameters(), *module.buffers()]:
            process_group.broadcast(tensor.data, root=0)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        for p in self._trained:
            p.register_post_accumulate_grad_hook(weakly(self._gradient_ready))

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """What the wrapped model gives."""
        return self.module(*inputs, **named_inputs)

    def _gradient_ready(self, parameter: Tensor) -> None:
        """Whichever it is: average all of them when backward has ended."""
        queue_callback(self._average_gradients)

    def _average_gradients(self) -> None:
        for p in self._trained:
            self.process_group.all_reduce(gradient_of(p), op="avg")


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The method as a hook that does not keep its object alive.

    Once a DDP object is gone, its model can be trained alone or be wrapped again.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if alive := reference():
            alive(parameter)

    return hook


def gradient_of(p: Parameter) -> Any:
    """The array of p's gradient, zeros if there was none: other ranks wait for it."""
    if p.grad is None:
        p.grad = Tensor(np.zeros_like(p.data))
    return p.grad.data


# ---- The real one ----


class DistributedDataParallel(Module):
    """Wraps `module`; sends gradients in buckets while backward still computes.

        backward     ... layer 2 ...    ... layer 1 ...    ... layer 0 ...   | wait
        hooks             2.weight           1.weight           0.weight
        comm thread             [ bucket 0 ------> ][ bucket 1 -------> ]

    module: the same on all ranks; names, shapes, dtypes, what is trained are compared.

    bucket_cap_mb: MiB at which a bucket closes; the first one closes at 1 MiB already.

    find_unused_parameters: the loss need not depend on all parameters. The graph is
    walked from the outputs of `forward` in every step, and one more all-reduce finds
    out which parameters no rank has used; their gradients are left as they were.

    broadcast_buffers: rank 0's buffers go to all before each forward in training.

    check_sync_every: how many backwards until the parameters of all ranks are compared
    (`check_sync`); 0 for never.

    Each gradient that `backward` leaves is a view into a bucket, averaged over the
    ranks. What counts for `no_sync` is whether *forward* ran inside it.

    Raises: UsageError from construction, on all ranks, if the models differ, and from
    `backward` if a parameter got no gradient; PeerError from both.

    In PyTorch: `DistributedDataParallel` and `Reducer` (reducer.cpp), whose names the
    methods have.
    """

    def __init__(
        self,
        module: Module,
        process_group: ProcessGroup,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        check_sync_every: int = 100,
    ):
        refuse_nested(module)
        self.module = module
        self.process_group = process_group
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self.check_sync_every, self._averaged = check_sync_every, 0
        self.require_backward_grad_sync = True
        self._cap_bytes = max(1, int(bucket_cap_mb * MIB))
        compare_models(module, process_group)
        for tensor in [*module.parameters(), *module.buffers()]:
            process_group.broadcast(tensor.data, root=0)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names, self._trained = [n for n, _ in named], [p for _, p in named]
        self.register_comm_hook(process_group, allreduce_hook)
        self._number: dict[Tensor, int] = {p: i for i, p in enumerate(self._trained)}
        self._arrived: list[int] | None = []  # None: the buckets have been rebuilt
        self._unused: list[int] | None = (
            None  # None: no forward since the last backward
        )
        self._sync, self._backward, self._next = False, 0, 0
        self._make_buckets(list(reversed(range(len(named)))))
        for p in self._trained:
            p.register_post_accumulate_grad_hook(weakly(self._autograd_hook))

    # ---- Forward ----

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """What the wrapped model gives."""
        self._sync = self.require_backward_grad_sync and is_recording()
        if self._sync:
            self._check_trained()
            if self.broadcast_buffers and self.module.training:
                for buffer in self.module.buffers():
                    self.process_group.broadcast(buffer.data, root=0)
        outputs = self.module(*inputs, **named_inputs)
        if self._sync and self.find_unused_parameters:
            self._prepare_for_backward(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of what runs forward inside stay local, and add up.

            with ddp.no_sync():
                for x, y in first_micro_batches:
                    loss(ddp(x), y).backward()
            loss(ddp(x_last), y_last).backward()     # averages the sum of all

        Forward has to be inside: when it runs, it is decided whether its backward
        sends.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` average the buckets (comm_hooks.py).

        The same on all ranks, or their calls will not match.
        """
        self._hook_state, self._hook = state, hook

    # ---- Backward ----

    def _autograd_hook(self, parameter: Tensor) -> None:
        """A gradient is complete."""
        if not self._sync:
            return
        queue_callback(self._finalize_backward)
        if self._backward != backward_number():  # the first gradient of this backward
            self._expect_backward()
        self._mark_variable_ready(self._number[parameter])

    def _expect_backward(self) -> None:
        self._backward, self._next = backward_number(), 0
        for bucket in self.buckets:
            bucket.expect()
        unused, self._unused = self._unused or [], None
        for i in unused:
            self._mark_variable_ready(i)

    def _mark_variable_ready(self, i: int) -> None:
        """Put a gradient into its bucket, and send what can be sent.

        Buckets leave in the order of their index, whichever is full first: another rank
        may fill them in another order, and the k-th all-reduce there meets ours.
        """
        bucket, slot = self._place[i]
        bucket.take(slot)
        if self._arrived is not None:
            self._arrived.append(i)
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.work = self._hook(self._hook_state, bucket)

    def _finalize_backward(self) -> None:
        """All gradients have come: wait for the averages."""
        if self._next < len(self.buckets):
            error = UsageError(self._unready())
            self.process_group.abort(error)  # the others would wait for our buckets
            raise error
        for bucket in self.buckets:
            assert bucket.work, "launched, as _next has passed it"
            bucket.work.wait()
        if self.find_unused_parameters:
            self._give_back_unused()
        elif self._arrived is not None:
            self._rebuild_buckets()
        self._averaged += 1
        if self.check_sync_every and self._averaged % self.check_sync_every == 0:
            self.check_sync()

    def _unready(self) -> str:
        names = [
            f"{self._names[self._number[p]]!r} (bucket {bucket.index})"
            for bucket in self.buckets
            for p, ready in zip(bucket.parameters, bucket.ready, strict=True)
            if not ready
        ]
        return (
            f"DDP never saw a gradient for {', '.join(names)} on rank "
            f"{self.process_group.rank} in this backward pass. Other ranks would wait "
            "for ever. Use it in the loss, freeze it, or pass "
            "find_unused_parameters=True."
        )

    # ---- Buckets ----

    def _make_buckets(self, order: Sequence[int]) -> None:
        """Buckets for gradients that arrive in this order; they move in with `take`."""
        sizes = [Size(p.data.nbytes, str(p.dtype)) for p in self._trained]
        first_bytes = min(FIRST_BUCKET_BYTES, self._cap_bytes)
        groups = plan(sizes, order, first_bytes, self._cap_bytes)
        self.buckets = [
            Bucket(index, [self._trained[i] for i in group])
            for index, group in enumerate(groups)
        ]
        self._place = {
            i: (bucket, slot)
            for bucket, group in zip(self.buckets, groups, strict=True)
            for slot, i in enumerate(group)
        }

    def _rebuild_buckets(self) -> None:
        """Once, after the first backward: in the order in which rank 0 got gradients.

        The order of definition was a guess. A layer that is defined first and used last
        would have kept its bucket from leaving until the end of backward.
        """
        order = np.array(self._arrived, np.int64)
        self.process_group.broadcast(order, root=0)
        self._arrived = None
        self._make_buckets(order.tolist())
        for bucket, slot in self._place.values():
            bucket.take(slot)

    def check_sync(self) -> None:
        """Compare all parameters of all ranks, bit for bit. Every rank must call it.

        Raises: ReplicaError on all ranks, naming the first parameter that differs.
        """
        check_sync(self.module, self.process_group)

    def describe(self) -> str:
        """The buckets as a table: index, bytes, and the parameters in them."""
        lines = ["bucket        bytes  parameters"]
        for bucket in self.buckets:
            names = ", ".join(self._names[self._number[p]] for p in bucket.parameters)
            lines.append(f"{bucket.index:>6} {bucket.flat.nbytes:>12,}  {names}")
        return "\n".join(lines)

    # ---- Parameters that are not used ----

    def _prepare_for_backward(self, outputs: Any) -> None:
        """Note which parameters the outputs of all forwards so far do not depend on."""
        used = leaves_behind(*tensors_in(outputs))
        unused = [i for i, p in enumerate(self._trained) if p not in used]
        if self._unused is None:
            self._unused = unused
        else:
            self._unused = [i for i in self._unused if i in unused]

    def _give_back_unused(self) -> None:
        """A gradient that another rank has is ours as well; one that none has, is
        None."""
        used = np.array([p.grad is not None for p in self._trained])
        self.process_group.all_reduce(used, "max")
        for i, p in enumerate(self._trained):
            if p.grad is None and used[i]:
                bucket, slot = self._place[i]
                p.grad = Tensor(bucket.views[slot])

    def _check_trained(self) -> None:
        """Raises: UsageError if parameters were frozen or unfrozen after wrapping."""
        for name, p in self.module.named_parameters():
            if p.requires_grad != (p in self._number):
                now = "trained" if p.requires_grad else "frozen"
                raise UsageError(
                    f"parameter {name!r} is {now} now, but was not when the model was "
                    "wrapped in DDP. Freeze and unfreeze first, then wrap (again)."
                )


# ---- What goes in, what comes out ----


def refuse_nested(module: Module) -> None:
    """Raises: UsageError if a part of this module is wrapped already."""
    kinds = NaiveDistributedDataParallel | DistributedDataParallel
    for name, part in module.named_modules():
        if isinstance(part, kinds):
            raise UsageError(
                f"{name or 'the module'} is in DDP already: its gradients would be "
                "averaged twice. Wrap the whole model once."
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise UsageError("this module has no parameter to train, so DDP has no use")


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors in what a forward gave: one, or tuples, lists and dicts of them."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, tuple | list):
        return [tensor for part in outputs for tensor in tensors_in(part)]
    return []
