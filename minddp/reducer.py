"""The Reducer: from a gradient that is complete to the average over all ranks.

    backward     ... layer 2 ...    ... layer 1 ...    ... layer 0 ...   | finalize
    hooks             2.weight           1.weight           0.weight     |
                         |                  |                  |         |
    comm thread          '-[ bucket 0 ----> ]-[ bucket 1 ----> ]-------> | wait, done

One backward, in the order of the methods below:

    autograd_hook            a gradient is complete
      expect_backward        ... the first one: nothing has been sent yet
      mark_variable_ready    copy it into its bucket; full buckets leave in index order
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

Which parameters will not get a gradient?  Three answers, by setting:

    (default)                 all get one; else an error that names those that did not
    find_unused_parameters    the graph behind the outputs of forward is walked
    static_graph              those that got none in the first backward never do

In PyTorch: `Reducer` (reducer.cpp), whose names the methods have.

Left out: a bucket's own stream on a GPU; gradients that are sparse.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minddp.autograd import Tensor, backward_number, leaves_behind, queue_callback
from minddp.buckets import FIRST_BUCKET_BYTES, Bucket, Size, plan
from minddp.comm_hooks import Hook, allreduce_hook
from minddp.ddp_logger import Logger
from minddp.errors import UsageError
from minddp.group import ProcessGroup
from minddp.join import RollCall
from minddp.nn import Module
from minddp.nonfinite import NonFiniteWatch
from minddp.replicas import check_sync


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
    ):
        self.module, self.process_group = module, process_group
        self.cap_bytes, self.check_sync_every = cap_bytes, check_sync_every
        self.find_unused, self.static_graph = find_unused_parameters, static_graph
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        self.number: dict[Tensor, int] = {p: i for i, p in enumerate(self.parameters)}
        self.sync = False  # whether the next backward sends; forward decides
        self.averaged = 0  # how many backwards have been
        self.hook_state: Any = process_group
        self.hook: Hook = allreduce_hook
        self.roll_call: RollCall | None = None
        self.watch = NonFiniteWatch(nan, self.names, process_group)
        self.logger = Logger(process_group)
        self.arrived: list[int] = []  # the first backward's order of gradients
        self.rebuilt = False
        self._unused: list[int] | None = None  # None: no forward since last backward
        self._uses: list[int] | None = None  # of a static graph, once it is known
        self._backward, self._next, self._scale = 0, 0, 1.0
        self._make_buckets(list(reversed(range(len(named)))))

    # ---- Forward ----

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Note which parameters the outputs of all forwards so far do not depend on."""
        used = leaves_behind(*outputs)
        unused = [i for i, p in enumerate(self.parameters) if p not in used]
        if self._unused is not None:
            unused = [i for i in self._unused if i in unused]
        self._unused = unused

    # ---- Backward ----

    def autograd_hook(self, parameter: Tensor) -> None:
        """A gradient is complete."""
        if not self.sync:
            return
        queue_callback(self.finalize_backward)
        if self._backward != backward_number():  # the first gradient of this backward
            self.expect_backward()
        i = self.number[parameter]
        self._fired[i] += 1
        if not self.rebuilt and self._fired[i] == 1:
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

    def expect_backward(self) -> None:
        """Before the first gradient: none has come, nothing has been sent."""
        self._backward, self._next = backward_number(), 0
        self._fired = [0] * len(self.parameters)
        self.logger.backward_starts()
        for bucket in self.buckets:
            bucket.expect()
        if self.roll_call:
            self._scale = self.roll_call.scale()
        if self._uses:
            self._unused = [i for i, uses in enumerate(self._uses) if uses == 0]
        unused, self._unused = self._unused or [], None
        for i in unused:
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
        """Its average is under way when this returns."""
        self.watch.before(bucket, self.number)
        bucket.work = self.hook(self.hook_state, bucket)

    def finalize_backward(self) -> None:
        """All gradients have come: wait for the averages."""
        if self.static_graph and self._uses is None:
            self._learn_uses()
        if self._next < len(self.buckets):
            self._refuse(self._unready())
        self.logger.compute_ends()
        for bucket in self.buckets:
            assert bucket.work, "launched, as _next has passed it"
            bucket.work.wait()
        self.logger.backward_ends()
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
        self._fired, self._next = [1] * len(self.parameters), len(self.buckets)
        self.arrived = self.arrived or list(range(len(self.parameters)))
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
        sizes = [Size(p.data.nbytes, str(p.dtype)) for p in self.parameters]
        first_bytes = min(FIRST_BUCKET_BYTES, self.cap_bytes)
        groups = plan(sizes, order, first_bytes, self.cap_bytes)
        self.buckets = [
            Bucket(index, [self.parameters[i] for i in group])
            for index, group in enumerate(groups)
        ]
        self.place = {
            i: (bucket, slot)
            for bucket, group in zip(self.buckets, groups, strict=True)
            for slot, i in enumerate(group)
        }
        for i, (bucket, slot) in self.place.items():
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
        for bucket, slot in self.place.values():
            bucket.take(slot)

    @property
    def speaker(self) -> int:
        """The rank whose word holds for all."""
        return self.roll_call.speaker if self.roll_call else 0

    # ---- Parameters that are not used ----

    def _learn_uses(self) -> None:
        """The end of a static graph's first backward: now all gradients are there."""
        self._uses = list(self._fired)
        unused = [i for i, uses in enumerate(self._uses) if uses == 0]
        self.arrived += unused
        for i in self.arrived:
            self.mark_variable_ready(i)

    def _give_back_unused(self) -> None:
        """A gradient that another rank has is ours as well; one that none has, is
        None."""
        used = np.ones(len(self.parameters), bool)
        if self.find_unused or self.static_graph:
            used[:] = [p.grad is not None for p in self.parameters]
            self.process_group.all_reduce(used, "max")
        for i, p in enumerate(self.parameters):
            if p.grad is None and used[i]:
                bucket, slot = self.place[i]
                p.grad = Tensor(bucket.views[slot])
