"""Answers to the exercises, with which their tests are tested."""

from collections import deque

import numpy as np

from minddp.handshake import Stranger
from minddp.ring import as_bytes, run_collective
from minddp.tensor_ops import Op


class Cube(Op):
    def forward(self, x):
        self.x = x
        return x**3

    def backward(self, gy):
        return (3 * self.x**2 * gy,)


def readiness_order(parameters, loss):
    order = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, p in parameters.items()
    ]
    loss().backward()
    for handle in handles:
        handle.remove()
    return order


def parrot():
    length = int.from_bytes((yield b"", 2), "big")
    if length > 256:
        raise Stranger("wants to say too much")
    word = yield b"", length
    yield word[::-1], 0
    return word


def pauses(deadline):
    pause = 0.05
    while deadline.left() > 0:
        yield min(pause, deadline.left())
        pause = min(2 * pause, 2.0)


def reduce_to_root(links, x, call, deadline):
    """The sum grows on its way around, from the root's right neighbour to the root."""
    r, n, root = links.rank, links.world_size, call.root
    total = x if r == root else x.copy()
    first = r == (root + 1) % n
    ready = deque([as_bytes(total)] if first and x.size else [])

    def script():
        if not first and x.size:
            received = np.empty_like(x)
            yield as_bytes(received)
            total[...] += received
            if r != root:
                ready.append(as_bytes(total))

    run_collective(links, ready, script(), call, deadline)


def scan(links, x, call, deadline):
    """The sum walks from rank 0 to rank n-1, and each keeps what it passes on."""
    first, last = links.rank == 0, links.rank == links.world_size - 1
    ready = deque([as_bytes(x)] if first and x.size else [])

    def script():
        if not first and x.size:
            received = np.empty_like(x)
            yield as_bytes(received)
            x[...] += received
            if not last:
                ready.append(as_bytes(x))

    run_collective(links, ready, script(), call, deadline)


def average_flat(parameters, pg):
    gradients = [p.grad.data for p in parameters]
    flat = np.concatenate([g.ravel() for g in gradients])
    pg.all_reduce(flat, op="avg")
    start = 0
    for g in gradients:
        g[...] = flat[start : start + g.size].reshape(g.shape)
        start += g.size


def average_parameters(parameters, pg):
    for p in parameters:
        pg.all_reduce(p.data, op="avg")
