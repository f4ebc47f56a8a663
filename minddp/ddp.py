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
Rule 3.  Order is the same on every rank: the reverse of definition, or the one that
         rank 0 has told the others. The k-th all-reduce of one rank meets the k-th of
         the others, whatever the two are about.

Worked example, n = 2: gradients 0.2 on rank 0 and 0.6 on rank 1 are 0.4 on both
afterwards. With lr = 0.1 both go down by 0.04.

First comes DDP as everybody writes it first: one all-reduce for each parameter, once
backward has ended. It is right, and it is slow in two ways which a profile shows at
once: a small parameter costs as many messages as a big one, and the network rests while
backward computes. It stays as the oracle of the second version, in which gradients
travel in buckets while backward still computes.

In PyTorch: `torch.nn.parallel.DistributedDataParallel`. What happens in backward is up
to its Reducer, as here (reducer.py).

Left out: several inputs on several devices. The naive version does not compare the
models (a parameter of another shape is a PeerMismatch from broadcast), and gives a
parameter that no rank uses a gradient of zeros, so that weight decay still moves it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from numbers import Real
from typing import Any

import numpy as np

from minddp.autograd import Tensor, is_recording, queue_callback
from minddp.buckets import BUCKET_CAP_MB, MIB, Bucket
from minddp.comm_hooks import Hook
from minddp.distributed import default_group
from minddp.errors import UsageError
from minddp.group import ProcessGroup
from minddp.join import RollCall, Step
from minddp.nn import Module, Parameter
from minddp.reducer import Reducer, weakly
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


def gradient_of(p: Parameter) -> Any:
    """The array of p's gradient, zeros if there was none: other ranks wait for it."""
    if p.grad is None:
        p.grad = Tensor(np.zeros_like(p.data))
    return p.grad.data


# ---- The real one ----


class DistributedDataParallel(Module):
    """Wraps `module`; sends gradients in buckets while backward still computes.

    module: the same on all ranks; names, shapes, dtypes, what is trained are compared.

    process_group: by default that of distributed.py.

    bucket_cap_mb: MiB at which a bucket closes; the first one closes at 1 MiB already.

    find_unused_parameters: the loss need not depend on all parameters. One more
    all-reduce in every step finds out which no rank has used; their gradients stay as
    they were.

    static_graph: every backward is like the first, which shows how often each parameter
    gets a gradient, and which get none. The first sends only when it has ended.

    broadcast_buffers: rank 0's buffers go to all before each forward in training.

    weight_by_batch: ranks may have batches of unequal length, even empty ones. Each
    counts by the length of its first input: if losses are means over the batch, the
    average is the gradient of the mean over the examples of all ranks.

    nan: "ignore", "raise" or "skip" gradients that are not finite (nonfinite.py).

    check_sync_every: how many backwards until the parameters of all ranks are compared
    (`check_sync`); 0 for never.

    gradient_as_bucket_view: gradients are views into buckets, and the next backward
    writes into the same memory, also into that of a gradient somebody has kept. False
    copies.

    device_ids, output_device: accepted for PyTorch's sake. A model is where its
    parameters are.

    When `backward` returns, every gradient is the average over the ranks. What counts
    for `no_sync` is whether *forward* ran inside it.

    Raises: UsageError from construction, on all ranks, if the models differ, and from
    `backward` if a parameter got no gradient; PeerError from both.

    In PyTorch: `DistributedDataParallel` (torch/nn/parallel/distributed.py).
    """

    def __init__(
        self,
        module: Module,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        check_sync_every: int = 100,
        *,
        static_graph: bool = False,
        weight_by_batch: bool = False,
        nan: str = "ignore",
        device_ids: Any = None,
        output_device: Any = None,
        gradient_as_bucket_view: bool = True,
    ):
        process_group = process_group or default_group()
        refuse_nested(module)
        self.module = module
        self.process_group = process_group
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        most_bytes = cap_bytes(bucket_cap_mb)
        # First of all: unlike models would make unlike buckets, which may be shared.
        compare_models(
            module,
            process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            broadcast_buffers=broadcast_buffers,
            weight_by_batch=weight_by_batch,
            nan=nan,
            check_sync_every=check_sync_every,
        )
        self.reducer = Reducer(
            module,
            process_group,
            cap_bytes=most_bytes,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            nan=nan,
            check_sync_every=check_sync_every,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        self._weight_by_batch = weight_by_batch
        if weight_by_batch:
            self.reducer.roll_call = RollCall(process_group, by_examples=True)
        self._broadcast_from(0, module.parameters())
        self.sync_buffers()

    # ---- Forward ----

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """What the wrapped model gives."""
        reducer = self.reducer
        reducer.logger.forward_starts()
        if not is_recording():  # no backward will come
            return self.module(*inputs, **named_inputs)
        sync = self.require_backward_grad_sync
        if sync:
            self._check_trained()
            if self.broadcast_buffers and self.module.training:
                self._agree_on_buffers()
        examples = 0
        if self._weight_by_batch:
            examples = batch_length([inputs, named_inputs])
        outputs = self.module(*inputs, **named_inputs)
        reducer.expect_from(tensors_in(outputs), sync, examples)
        return outputs

    def _agree_on_buffers(self) -> None:
        if self.reducer.roll_call and list(self.module.buffers()):
            self.reducer.roll_call.hold(Step.BUFFERS)
        self.sync_buffers()

    def sync_buffers(self) -> None:
        """Buffers become those of rank 0 (inside `join`, of a rank that has data).

        Every rank must call it.
        """
        self._broadcast_from(self.reducer.speaker, self.module.buffers())

    def _broadcast_from(self, root: int, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.process_group.broadcast(tensor.data, root)

    def _check_trained(self) -> None:
        """Raises: UsageError if parameters were frozen, unfrozen or converted since."""
        for name, p in self.module.named_parameters():
            if p.requires_grad != (p in self.reducer.number):
                now = "trained" if p.requires_grad else "frozen"
                raise UsageError(
                    f"parameter {name!r} is {now} now, but was not when the model was "
                    "wrapped in DDP. Freeze and unfreeze first, then wrap (again)."
                )
        for bucket in self.buckets:
            for p in bucket.parameters:
                if p.dtype != bucket.flat.dtype:
                    raise UsageError(
                        f"a parameter of {bucket.flat.dtype} has become {p.dtype} "
                        "since the model was wrapped in DDP. Convert first, then wrap."
                    )

    # ---- When and how gradients are averaged ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of what runs forward inside stay local, and add up.

            with ddp.no_sync():
                for x, y in first_micro_batches:
                    loss(ddp(x), y).backward()
            loss(ddp(x_last), y_last).backward()     # averages the sum of all

        Forward has to be inside: when it runs, it is decided whether its backward
        sends. A backward of several forwards sends if one of them was outside.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        then: Callable[[], Any] | None = None,
    ) -> Iterator[None]:
        """Ranks may have different numbers of batches inside (join.py).

            with ddp.join():
                for x, y in loader:
                    ...

        divide_by_initial_world_size: the average is the sum over n, also when fewer
        than n ranks have data; else it is the sum over those that have.

        throw_on_early_termination: a UsageError on all ranks as soon as one has no more
        data.

        then: called after each backward of the others that this rank has attended,
        without data but with their gradients. Give it what they do then, such as
        `optimizer.step`, and also optimizer state stays equal. Without it the rank
        takes over the parameters in the end, but has momentum of its own.

        Every rank must enter, and end its block without an error. At the end of its
        block a rank waits for the others' next step as long as a collective does.

        Raises: UsageError; PeerError.
        """
        if not enable:
            yield
            return
        roll_call = RollCall(
            self.process_group,
            self._weight_by_batch,
            absent_weight=1.0 if divide_by_initial_world_size else 0.0,
            raise_if_absent=throw_on_early_termination,
        )
        outside, self.reducer.roll_call = self.reducer.roll_call, roll_call
        try:
            yield
            self._attend(roll_call, then)
        finally:
            self.reducer.roll_call = outside

    def _attend(self, roll_call: RollCall, then: Callable[[], Any] | None) -> None:
        """This rank has no more data: do what the others do, until they have none."""
        while step := roll_call.be_absent():
            if step == Step.BUFFERS:
                self.sync_buffers()
            else:
                self.reducer.attend_backward()
                if then:
                    then()
        last = roll_call.last_present
        self._broadcast_from(last, [*self.module.parameters(), *self.module.buffers()])

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` average the buckets (comm_hooks.py).

        The same on all ranks, or their calls will not match.
        """
        self.reducer.hook_state, self.reducer.hook = state, hook

    def __deepcopy__(self, memo: Any) -> Any:
        raise UsageError(
            "a DDP cannot be copied: its copy would send as well. Copy ddp.module, and "
            "wrap it if it is to be trained."
        )

    # ---- Looking at it ----

    def check_sync(self) -> None:
        """Compare all parameters of all ranks, bit for bit. Every rank must call it.

        Raises: ReplicaError on all ranks, naming the first parameter that differs.
        """
        check_sync(self.module, self.process_group)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they leave."""
        return self.reducer.buckets

    @property
    def skipped_steps(self) -> int:
        """How many averages were dropped because of nan="skip"."""
        return self.reducer.watch.skipped

    def describe(self) -> str:
        """The buckets as a table: index, bytes, and the parameters in them."""
        lines = ["bucket        bytes  parameters"]
        for bucket in self.buckets:
            names = [
                self.reducer.names[self.reducer.number[p]] for p in bucket.parameters
            ]
            row = f"{bucket.index:>6} {bucket.flat.nbytes:>12,}  {', '.join(names)}"
            lines.append(row)
        return "\n".join(lines)

    def logging_data(self) -> dict[str, Any]:
        """What this DDP is and what its latest steps took (ddp_logger.py).

        Times are in nanoseconds, sizes in bytes, under PyTorch's names where it has
        them. Parameters are numbered in order of definition, frozen ones left out.
        """
        reducer, pg = self.reducer, self.process_group
        sizes = [bucket.flat.nbytes for bucket in self.buckets]
        numbers = [[reducer.number[p] for p in b.parameters] for b in self.buckets]
        return {
            "module_name": type(self.module).__name__,
            "rank": pg.rank,
            "world_size": pg.world_size,
            "backend_name": pg.transport,
            "iteration": reducer.averaged,
            "num_parameter_tensors": len(reducer.parameters),
            "total_parameter_size_bytes": sum(
                p.data.nbytes for p in reducer.parameters
            ),
            "dtypes": sorted({str(p.dtype) for p in reducer.parameters}),
            "bucket_cap_bytes": reducer.cap_bytes,
            "find_unused_parameters": reducer.find_unused,
            "static_graph": reducer.static_graph,
            "broadcast_buffers": self.broadcast_buffers,
            "gradient_as_bucket_view": True,
            "comm_hook": getattr(reducer.hook, "__name__", repr(reducer.hook)),
            "has_rebuilt_buckets": reducer.rebuilt,
            "bucket_sizes": sizes,
            "per_bucket_param_indices": numbers,
            "prev_iteration_grad_ready_order_indices": list(reducer.arrived),
            "skipped_steps": self.skipped_steps,
            **reducer.logger.data(),
        }


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
    """The tensors in what a forward gave: one, or tuples, lists, dicts and dataclasses
    of them."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return [tensor for part in parts_of(outputs) for tensor in tensors_in(part)]


def batch_length(inputs: Any) -> int:
    """The length of the first tensor or array in what a forward was given.

    Raises: UsageError if there is none.
    """
    to_look_at = [inputs]
    for x in to_look_at:  # grows while it runs
        if isinstance(x, Tensor | np.ndarray) and x.ndim > 0:
            return len(x)
        to_look_at += parts_of(x)
    raise UsageError(
        "weight_by_batch: the input has no tensor, so there is no telling how many "
        "examples it holds"
    )


def parts_of(x: Any) -> list[Any]:
    """What is in a tuple, a list, a dict or a dataclass; of all else, nothing."""
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, tuple | list):
        return list(x)
    return list(vars(x).values()) if is_dataclass(x) else []


def cap_bytes(bucket_cap_mb: float) -> int:
    """MiB as bytes, 1 at least. Raises: UsageError."""
    if not isinstance(bucket_cap_mb, Real) or not 0 < float(bucket_cap_mb) < 1e9:
        raise UsageError(
            f"bucket_cap_mb={bucket_cap_mb!r}: it is a number of MiB above 0, as in 25"
        )
    return max(1, int(float(bucket_cap_mb) * MIB))
