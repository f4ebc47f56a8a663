"""The Reducer: from a gradient that is complete to the average over all ranks.

    backward     ... layer 2 ...    ... layer 1 ...    ... layer 0 ...   | finalize
    hooks             2.weight           1.weight           0.weight     |
                         |                  |                  |         |
    comm thread          '-[ bucket 0 ----> ]-[ bucket 1 ----> ]-------> | wait, done

One backward, in the order of the methods below:

    autograd_hook            a gradient is complete
      _begin                 ... the first one: whose forward was it, does it send?
      expect_backward        ... if it sends: nothing has been sent yet
      mark_variable_ready    it is in its bucket; full buckets leave in index order
        launch               ask the communication hook for the average
    finalize_backward        backward has ended: wait for the averages
      rebuild_buckets        once, in the order in which gradients really came

Rule 1.  Buckets leave in the order of their index, whichever is full first. Another
         rank may fill them in another order, and the k-th all-reduce there meets ours.
Rule 2.  Every rank sends every bucket in every backward that sends at all. A gradient
         that this rank does not have is sent as zeros; one that should have come and
         did not is an error that ends the group, for the others would wait for ever.
Rule 3.  The average is over ranks, each of which counts as one. Where ranks count by
         their examples, or some have no data any more, gradients are scaled before
         they leave (join.py).

Whose backward is it?  Forward leaves a note at the graph nodes of its outputs. The
backward that comes through one of them is its own. So what runs in between, evaluation
or another wrapper of the same model, does not matter, and a backward that comes from
elsewhere is none of ours.

Which parameters will not get a gradient?  Three answers, by setting:

    (default)                 all get one; else an error that names those that did not
    find_unused_parameters    those that backward will not come to: it knows its graph
    static_graph              those that got none in the first backward never do

In PyTorch: `Reducer` (reducer.cpp), from which most names are; see docs/pytorch-map.md.
Its search for unused parameters walks the graph from the outputs of forward, before
backward is known.

Left out: a bucket's own stream on a GPU; gradients that are sparse.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from minddp.autograd import (
    Node,
    Pass,
    RemovableHandle,
    Tensor,
    current_pass,
    queue_callback,
)
from minddp.buckets import FIRST_BUCKET_BYTES, Bucket, Size, plan
from minddp.comm_hooks import Hook, allreduce_hook
from minddp.ddp_logger import Logger
from minddp.device import Array
from minddp.errors import UsageError
from minddp.group import ProcessGroup
from minddp.join import RollCall
from minddp.nn import Module, Parameter
from minddp.nonfinite import NonFiniteWatch
from minddp.replicas import check_sync


@dataclass(frozen=True, eq=False)
class Forward:
    """One forward of the wrapped module: does its backward send, how many examples?"""

    sync: bool
    examples: int


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The method as a hook that does not keep its object alive.

    Once a DDP object is gone, its model can be trained alone or be wrapped again.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if alive := reference():
            alive(parameter)

    return hook


def let_go(parameters: Sequence[Parameter], hooks: Sequence[RemovableHandle]) -> None:
    """Once their Reducer has gone, gradients have arrays of their own again."""
    for p in parameters:
        p.grad_home = None
    for hook in hooks:
        hook.remove()


class Reducer:
    """Averages the gradients of a module's parameters; the settings are those of DDP.

    cap_bytes: at which a bucket closes; the first one closes at 1 MiB already.
    """

    def __init__(
        self,
        module: Module,
        process_group: ProcessGroup,
        *,
        cap_bytes: int,
        find_unused_parameters: bool,
        static_graph: bool,
        nan: str,
        check_sync_every: int,
        gradient_as_bucket_view: bool,
    ):
        self.module, self.process_group = module, process_group
        self.cap_bytes, self.check_sync_every = cap_bytes, check_sync_every
        self.static_graph = static_graph  # finds out by itself what is unused
        self.find_unused = find_unused_parameters and not static_graph
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        self.number: dict[Tensor, int] = {p: i for i, p in enumerate(self.parameters)}
        self.as_view = gradient_as_bucket_view
        self._forwards: WeakKeyDictionary[Node, Forward] = WeakKeyDictionary()
        self._hidden: Forward | None = None  # one with outputs we cannot look into
        self._pass: object = None  # the token of the backward that is under way
        self.sync = False  # whether that one sends
        self.averaged = 0  # how many backwards have been
        self.hook_state: Any = process_group
        self.hook: Hook = allreduce_hook
        self.roll_call: RollCall | None = None
        self.watch = NonFiniteWatch(nan, self.names, process_group)
        self.logger = Logger(process_group)
        self.arrived: list[int] = []  # the first backward's order of gradients
        self.rebuilt = False
        self._uses: list[int] | None = None  # of a static graph, once it is known
        self._next = 0  # the bucket that is to leave next
        self._scale = 1.0  # what this rank's gradients count for
        self._fired: list[int] = []  # how often each has come in this backward
        self._touched: set[int] = set()  # those that have, since the last average
        self._stale: dict[int, Array] = {}  # gradients that are not of this backward
        self._examples = 0  # in backwards since the last average
        self._make_buckets(list(reversed(range(len(named)))))
        hook = weakly(self.autograd_hook)
        hooks = [p.register_post_accumulate_grad_hook(hook) for p in self.parameters]
        weakref.finalize(self, let_go, self.parameters, hooks).atexit = False

    # ---- Forward ----

    def expect_from(self, outputs: Sequence[Tensor], sync: bool, examples: int) -> None:
        """A forward has given these outputs; a backward through one of them is its own.

        sync: whether such a backward sends. examples: how many it is about.
        """
        forward = Forward(sync, examples)
        nodes = [y.node for y in outputs if y.node is not None]
        for node in nodes:
            self._forwards[node] = forward
        if sync and not nodes:  # outputs we cannot look into: it may be any backward
            self._hidden = forward

    # ---- Backward ----

    def autograd_hook(self, parameter: Tensor) -> None:
        """A gradient is complete."""
        current = current_pass()
        if self._pass is not current.token:  # the first one of this backward
            self._begin(current)
        i = self.number[parameter]
        self._touched.add(i)
        if not self.sync:
            return
        queue_callback(self.finalize_backward)
        self._fired[i] += 1
        if self.averaged == 0 and self._fired[i] == 1:
            self.arrived.append(i)
        if not self.static_graph:
            self.mark_variable_ready(i)
        elif self._uses:  # else we do not know yet whether it will come again
            if self._fired[i] > self._uses[i]:
                self._refuse(
                    f"{self.names[i]!r} got a gradient more often on rank "
                    f"{self.process_group.rank} than in the first backward "
                    f"({self._uses[i]} times). static_graph=True promises that all are "
                    "alike; leave it out if they are not."
                )
            if self._fired[i] == self._uses[i]:
                self.mark_variable_ready(i)

    def _begin(self, current: Pass) -> None:
        """Which forwards does this backward belong to, and does it send?"""
        self._pass = current.token
        forwards = {f for node, f in self._forwards.items() if node in current.nodes}
        if self._hidden:
            forwards.add(self._hidden)
        self.sync = any(forward.sync for forward in forwards)
        self._examples += sum(forward.examples for forward in forwards)
        if self.sync:
            self.expect_backward(current)

    def expect_backward(self, current: Pass) -> None:
        """Before the first gradient: none has come, nothing has been sent."""
        self._next, self._hidden = 0, None
        self._fired = [0] * len(self.parameters)
        if self.averaged == 0:
            self.arrived.clear()  # of an attempt that failed
        self.logger.backward_starts()
        for bucket in self.buckets:
            bucket.expect()
        self._scale = 1.0
        if self.roll_call:
            self._scale = self.roll_call.scale(self._examples)
        self._examples = 0
        for i in self._unused_in(current):
            p = self.parameters[i]
            if p.grad is not None and i not in self._touched:
                self._stale[i] = p.grad.data.copy()
            self.mark_variable_ready(i)

    def mark_variable_ready(self, i: int) -> None:
        """Put a gradient into its bucket, and send what can be sent."""
        bucket, slot = self.place[i]
        if bucket.ready[slot]:
            self._refuse(
                f"{self.names[i]!r} got a second gradient in one backward on rank "
                f"{self.process_group.rank}, when its bucket had counted it already: "
                "the loss uses it apart from the outputs of forward, or backward ran "
                "again inside backward. If it is so in every step, pass "
                "static_graph=True instead of find_unused_parameters."
            )
        bucket.take(slot, self._scale)
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self.launch(self.buckets[self._next])
            self._next += 1

    def launch(self, bucket: Bucket) -> None:
        """Ask for its average, which is there when its work has been waited for."""
        self.watch.before(bucket, self.number)
        bucket.work = self.hook(self.hook_state, bucket)
        if not hasattr(bucket.work, "wait"):
            self._refuse(
                f"the communication hook returned {bucket.work!r} for bucket "
                f"{bucket.index}, not something to wait for (comm_hooks.py)"
            )

    def finalize_backward(self) -> None:
        """All gradients have come: wait for the averages."""
        if self.static_graph and self._uses is None and self.sync:
            self._learn_uses()
        if self._next < len(self.buckets):
            self._refuse(self._unready())
        self.logger.compute_ends()
        for bucket in self.buckets:
            assert bucket.work is not None, "launched, as _next has passed it"
            bucket.work.wait()
        works = [bucket.work for bucket in self.buckets]
        self.logger.backward_ends(sum(getattr(work, "busy_ns", 0) for work in works))
        self.averaged += 1
        self._give_back_unused()
        if not self.rebuilt and not self.find_unused:
            self.rebuild_buckets()
        self.watch.after(self.buckets, self.number)
        every = self.check_sync_every
        all_present = self.roll_call is None or self.roll_call.all_present
        if every and self.averaged % every == 0 and all_present:
            check_sync(self.module, self.process_group)

    def attend_backward(self) -> None:
        """The backward of a rank without data: zeros in all buckets (join.py)."""
        self.sync, self._next = False, len(self.buckets)
        self.arrived = self.arrived or list(range(len(self.parameters)))
        self.logger.forward_starts()
        self.logger.backward_starts()
        for p in self.parameters:
            p.grad = None
        for bucket in self.buckets:
            bucket.expect()
            for slot in range(len(bucket.parameters)):
                bucket.take(slot)
            self.launch(bucket)
        self.finalize_backward()

    def _refuse(self, text: str) -> None:
        """End the group, for the others would wait for our buckets."""
        error = UsageError(text)
        self.process_group.abort(error)
        raise error

    def _unready(self) -> str:
        names = [
            f"{self.names[self.number[p]]!r} (bucket {bucket.index})"
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
        kinds = [f"{p.dtype} on {p.device.type}" for p in self.parameters]
        nbytes = [p.data.nbytes for p in self.parameters]
        sizes = [Size(*size) for size in zip(nbytes, kinds, strict=True)]
        first_bytes = min(FIRST_BUCKET_BYTES, self.cap_bytes)
        groups = plan(sizes, order, first_bytes, self.cap_bytes)
        zeros = self.process_group.zeros
        self.buckets = [
            Bucket(index, [self.parameters[i] for i in group], self.as_view, zeros)
            for index, group in enumerate(groups)
        ]
        self.place = {
            i: (bucket, slot)
            for bucket, group in zip(self.buckets, groups, strict=True)
            for slot, i in enumerate(group)
        }
        for i, (bucket, slot) in self.place.items() if self.as_view else ():
            self.parameters[i].grad_home = bucket.views[slot]

    def rebuild_buckets(self) -> None:
        """Once, after the first backward: in the order in which one rank got gradients.

        The order of definition was a guess. A layer that is defined first and used last
        would have kept its bucket from leaving until the end of backward.
        """
        order = np.array(self.arrived, np.int64)
        self.process_group.broadcast(order, self.speaker)
        self.rebuilt, self.arrived = True, order.tolist()
        self._make_buckets(self.arrived)
        for bucket, slot in self.place.values() if self.as_view else ():
            bucket.take(slot)

    @property
    def speaker(self) -> int:
        """The rank whose word holds for all."""
        return self.roll_call.speaker if self.roll_call else 0

    # ---- Parameters that are not used ----

    def _unused_in(self, current: Pass) -> list[int]:
        """The parameters that this backward will not come to."""
        if self._uses:
            return [i for i, uses in enumerate(self._uses) if uses == 0]
        if self.find_unused:
            parameters = enumerate(self.parameters)
            return [i for i, p in parameters if p not in current.leaves]
        return []

    def _learn_uses(self) -> None:
        """The end of a static graph's first backward: now all gradients are there."""
        self._uses = list(self._fired)
        unused = [i for i, uses in enumerate(self._uses) if uses == 0]
        self.arrived += unused
        for i in self.arrived:
            self.mark_variable_ready(i)

    def _give_back_unused(self) -> None:
        """A gradient that another rank has is ours as well; one that none has stays as
        it was."""
        used = np.ones(len(self.parameters), bool)
        if self.find_unused or self.static_graph:
            used[:] = [i in self._touched for i in range(len(used))]
            self.process_group.all_reduce(used, "max")
        for i, p in enumerate(self.parameters):
            bucket, slot = self.place[i]
            if used[i] and (p.grad is None or not self.as_view):
                bucket.give(slot)
            elif not used[i] and i in self._stale:
                bucket.views[slot][...] = self._stale[i]
        self._touched.clear()
        self._stale.clear()
