"""Where arrays live: NumPy on the host, CuPy on a GPU, behind one set of names.

                    Device("cpu")               Device("cuda:1")
    xp              numpy                       cupy, imported on first use
    put(x)          to_host(x)                  copies from host to GPU
    to_host(x)      x itself, no copy           copies to the host, waits for the GPU

Rule 1.  Formulas ask an array for its library, `xp = array_module(x)`, and call
         `xp.exp` and so on: one text serves both.
Rule 2.  CuPy is imported here and in backends/nccl.py only, once a GPU was asked for.
Rule 3.  Random numbers come from the host (`generator`). CuPy's stream depends on
         the model of the GPU, NumPy's does not: replicas on unlike machines, given
         one seed, start from one set of weights.

Worked example.  `array_module(numpy.ones(3))` is numpy. `Device("cuda:0")` without a
usable GPU is a UsageError that says what is missing, never a silent fall-back.

Invariant.  The device-to-host copy has one name, `to_host`: to find out where a program
waits for its GPU, search for that name.

Cost.  `array_module` of a NumPy array is one comparison of types, about 50 ns.

In PyTorch: `torch.device`, `Tensor.to`, `torch.manual_seed`.

Left out:
- streams, events and page-locked buffers: no formula needs them;
- random numbers drawn on the GPU (rule 3).
The CUDA branches can be read, but not tried, on a machine without a GPU.
"""

import importlib
import sys
import threading
from typing import Any, TypeAlias

import numpy as np

from minddp.errors import UsageError

# A numpy.ndarray or a cupy.ndarray: same methods, but no common base class to name.
Array: TypeAlias = Any


def array_module(x: Array) -> Any:
    """The library x belongs to: `cupy` for a CuPy array, `numpy` for all else."""
    if type(x) is np.ndarray:
        return np
    cupy = sys.modules.get("cupy")  # no CuPy array exists before CuPy is imported
    return cupy if cupy is not None and isinstance(x, cupy.ndarray) else np


class Device:
    """A place for arrays: "cpu", "cuda" (the thread's current GPU) or "cuda:1"."""

    xp: Any

    def __init__(self, spec: "str | Device" = "cpu"):
        self.type, _, number = str(spec).partition(":")
        if self.type not in ("cpu", "cuda") or (number and not number.isdecimal()):
            raise UsageError(f"no device {spec!r}: use 'cpu', 'cuda' or 'cuda:1'")
        if self.type == "cpu":
            self.xp, self.index = np, 0
        else:
            self.xp = _usable_cupy(str(spec))
            self.index = int(number or self.xp.cuda.runtime.getDevice())

    def put(self, x: Array) -> Array:
        """x on this device: x itself if it is there already, else a copy."""
        if self.type == "cpu":
            return to_host(x)
        with self.xp.cuda.Device(self.index):
            return self.xp.asarray(x)

    def use(self) -> None:
        """Make this the thread's current device (a new thread starts on GPU 0)."""
        if self.type == "cuda":
            self.xp.cuda.Device(self.index).use()

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return "cpu" if self.type == "cpu" else f"cuda:{self.index}"

    def __repr__(self) -> str:
        return f"Device({str(self)!r})"


def _usable_cupy(spec: str) -> Any:
    """CuPy, once it has found a GPU (`import cupy` alone succeeds without one)."""
    try:
        cupy = importlib.import_module("cupy")
        cupy.cuda.runtime.getDeviceCount()
    except ImportError as exc:
        raise UsageError(
            f"device {spec!r} needs CuPy, which is not installed. Install what fits "
            "the driver, with pip install 'minddp[cuda12]' or 'minddp[cuda13]', or use "
            "device 'cpu'."
        ) from exc
    except RuntimeError as exc:  # CUDARuntimeError: no driver, an old driver, no GPU
        raise UsageError(
            f"device {spec!r} is not usable: CuPy is installed, but CUDA says {exc}. "
            "Look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use device 'cpu'."
        ) from exc
    return cupy


def device_of(x: Array) -> Device:
    """The device that x lives on."""
    return Device("cpu" if array_module(x) is np else f"cuda:{x.device.id}")


def to_host(x: Array) -> Array:
    """x as a NumPy array: x itself if it is one, else a copy, made when it is ready."""
    return np.asarray(x) if array_module(x) is np else x.get()


def scatter_add(dst: Array, index: Any, v: Array) -> None:
    """dst[index] += v, where an index that occurs k times adds k times.

    A plain `dst[index] += v` reads the rows, adds, and writes them back: of k additions
    to one row the last alone would survive. A GPU performs the k additions in no fixed
    order, so there the last bits of the sum may differ between runs.
    """
    array_module(dst).add.at(dst, index, v)


# ---- Random numbers: one host generator per thread ----


class _Random(threading.local):
    """Per thread: where ranks are threads, they must not share one stream."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()


_random = _Random()


def manual_seed(seed: int) -> np.random.Generator:
    """Restart this thread's random stream at `seed` and return it."""
    try:
        _random.generator = np.random.default_rng(seed)
    except (ValueError, TypeError) as exc:
        raise UsageError(f"manual_seed({seed!r}): {exc}") from exc
    return _random.generator


def generator() -> np.random.Generator:
    """This thread's random stream; the system seeds it until `manual_seed` does."""
    return _random.generator
