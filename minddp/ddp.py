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
Rule 3.  Order is the order of definition, on every rank. The k-th all-reduce of one
         rank meets the k-th of the others, whatever the two are about.

Worked example, n = 2: gradients 0.2 on rank 0 and 0.6 on rank 1 are 0.4 on both
afterwards. With lr = 0.1 both go down by 0.04.

What follows is DDP as everybody first writes it: one all-reduce for each parameter,
once backward has ended. It is right, and it is slow in two ways which a profile shows
at once: a small parameter costs as many messages as a big one, and the network rests
while backward computes. It stays in this file as the oracle for any faster version.

In PyTorch: `torch.nn.parallel.DistributedDataParallel`, without its Reducer.

Left out: buckets; communication during backward; ranks with different numbers of
batches; a comparison of the models (a parameter of another shape is a PeerMismatch from
broadcast); parameters that no rank uses (they get a gradient of zeros, so weight decay
still moves them).
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from minddp.autograd import Tensor, queue_callback
from minddp.group import ProcessGroup
from minddp.nn import Module, Parameter


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


DistributedDataParallel = NaiveDistributedDataParallel
