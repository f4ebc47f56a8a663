"""A double of NCCL, for fakecupy.py: ranks are threads, and kernels tasks of streams.

A kernel reads and writes memory by its address, LATE_SECONDS after all ranks have come;
without one of them it stays on its stream until `abort`.
"""

import ctypes
import itertools
import threading
import time
from collections import deque

import numpy as np

from minddp.bfloat16 import BFLOAT16, add_bfloat16

LATE_SECONDS = 0.002
KINDS = ["int8", "uint8", "int32", "int64", "float16", "float32", "float64"]
TYPES = {f"NCCL_{kind.upper()}": kind for kind in KINDS} | {"NCCL_BFLOAT16": BFLOAT16}
ADDERS = [np.add, np.multiply, np.maximum, np.minimum, np.add]
ADD = dict(zip(("SUM", "PROD", "MAX", "MIN", "AVG"), ADDERS, strict=True))
ADD = {f"NCCL_{name}": adder for name, adder in ADD.items()}
CONSTANTS = {name: i for names in (TYPES, ADD) for i, name in enumerate(names)}
available = True
streams, current_gpu = {}, None  # fakecupy's


class NcclError(RuntimeError):
    pass


class Faults:
    """What goes wrong, and what was called: (name, rank).

    silent: ranks whose kernels never start. stuck: ranks whose calls do not return
    before an abort. error: what `check_async_error` finds. id_error: what get_unique_id
    says.
    """

    def __init__(self):
        self.silent, self.stuck, self.calls = set(), set(), []
        self.error = self.id_error = ""


faults = Faults()
cliques, lock, numbers = {}, threading.Lock(), itertools.cycle(range(256))
asked = threading.local()  # what this thread's group has asked for


class Clique:
    """The ranks of one id: where they are, what they gave to call k, what they sent."""

    def __init__(self):
        self.gpus, self.given, self.mail = {}, {}, {}
        self.changed = threading.Condition()


def reset():
    faults.__init__()
    cliques.clear()


def memory(address, count, dtype):
    dtype = np.dtype(list(TYPES.values())[dtype])
    content = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(content, dtype)


def total(given, op):
    add = list(ADD.values())[op]
    if given[0].dtype == BFLOAT16:
        add = add_bfloat16
    x = given[0]
    for y in given[1:]:
        x = add(x, y, out=np.empty_like(y))
    return x / len(given) if op == CONSTANTS["NCCL_AVG"] else x


def get_unique_id():
    if faults.id_error:
        raise NcclError(faults.id_error)
    return bytes([0, 255, 128, 0, next(numbers)]) + bytes(range(133, 256))


class NcclCommunicator:
    def __init__(self, ndev, commId, rank):
        assert type(commId) is bytes
        assert len(commId) == 128
        with lock:
            self._clique = clique = cliques.setdefault(commId, Clique())
        self._n, self._rank, self._aborted, self._count = ndev, rank, False, 0
        self._gpu = current_gpu()
        with clique.changed:
            clique.gpus[rank] = self._gpu
            clique.changed.notify_all()
            clique.changed.wait_for(lambda: len(clique.gpus) == ndev)
        if len(set(clique.gpus.values())) < ndev:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")

    def _ask(self, stream, name, kernel, ready=None):
        faults.calls.append((name, self._rank))
        assert streams[stream].device_id == current_gpu() == self._gpu
        if self._rank in faults.stuck:
            self._come(lambda: False)
            raise NcclError("NCCL_ERROR_REMOTE_ERROR")
        if hasattr(asked, "group"):
            asked.group.append((self._rank, streams[stream], kernel, ready))
        else:
            streams[stream].put(kernel)

    def _come(self, ready=lambda: True):
        """Until it is ready, or an abort; False if that."""
        with self._clique.changed:
            self._clique.changed.wait_for(
                lambda: self._aborted or (self._rank not in faults.silent and ready())
            )
        return not self._aborted

    def _together(self, stream, name, send, recv, result):
        def kernel():
            self._count += 1
            given = self._clique.given.setdefault(self._count, {})
            if not self._come():
                return
            with self._clique.changed:
                given[self._rank] = send.copy()
                self._clique.changed.notify_all()
            if self._come(lambda: len(given) == self._n):
                time.sleep(LATE_SECONDS)
                if recv is not None:
                    recv[...] = result([given[r] for r in range(self._n)])

        self._ask(stream, name, kernel)

    def allReduce(self, send, recv, count, dtype, op, stream):
        buffers = memory(send, count, dtype), memory(recv, count, dtype)
        self._together(stream, "allReduce", *buffers, lambda given: total(given, op))

    def reduce(self, send, recv, count, dtype, op, root, stream):
        recv = memory(recv, count, dtype) if self._rank == root else None
        buffers = memory(send, count, dtype), recv
        self._together(stream, "reduce", *buffers, lambda given: total(given, op))

    def reduceScatter(self, send, recv, count, dtype, op, stream):
        def mine(given):
            return np.split(total(given, op), self._n)[self._rank]

        buffers = memory(send, count * self._n, dtype), memory(recv, count, dtype)
        self._together(stream, "reduceScatter", *buffers, mine)

    def broadcast(self, send, recv, count, dtype, root, stream):
        buffers = memory(send, count, dtype), memory(recv, count, dtype)
        self._together(stream, "broadcast", *buffers, lambda given: given[root])

    def allGather(self, send, recv, count, dtype, stream):
        buffers = memory(send, count, dtype), memory(recv, count * self._n, dtype)
        self._together(stream, "allGather", *buffers, np.concatenate)

    def send(self, buffer, count, dtype, peer, stream):
        def kernel():
            if self._come():
                with self._clique.changed:
                    box = self._box(self._rank, peer)
                    box.append(memory(buffer, count, dtype).copy())
                    self._clique.changed.notify_all()

        self._ask(stream, "send", kernel)

    def recv(self, buffer, count, dtype, peer, stream):
        box = self._box(peer, self._rank)

        def kernel():
            if self._come(lambda: box):
                memory(buffer, count, dtype)[...] = box.popleft()

        self._ask(stream, "recv", kernel, ready=lambda: box)

    def _box(self, source, target):
        return self._clique.mail.setdefault((source, target), deque())

    def check_async_error(self):
        if faults.error:
            raise NcclError(faults.error)

    def abort(self):
        faults.calls.append(("abort", self._rank))
        self._aborted = True
        with self._clique.changed:
            self._clique.changed.notify_all()

    def destroy(self):
        faults.calls.append(("destroy", self._rank))


def groupStart():
    asked.group = []


def groupEnd():
    tasks = asked.group
    del asked.group
    if tasks:
        rank, stream, *_ = tasks[0]
        stream.put(lambda: together(rank, [task[2:] for task in tasks]))


def together(rank, tasks):
    """In no promised order: what has come is received before anything else is sent."""
    time.sleep(LATE_SECONDS * (1 + rank))
    while tasks:
        come = [task for task in tasks if task[1] and task[1]()]
        other = [task for task in tasks if not task[1]]
        task = (come or other or tasks)[0]
        tasks.remove(task)
        task[0]()
