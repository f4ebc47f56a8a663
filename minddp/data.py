"""Data: datasets, mini-batches, and which rank gets which sample.

    n = 2 ranks, 10 samples, shuffled once per epoch, the same way on every rank

    position    0  1  2  3  4  5  6  7  8  9
    sample      4  6  2  7  3  5  9  0  8  1      order(seed, epoch)
    rank        0  1  0  1  0  1  0  1  0  1      position % n

    rank 0 reads 4 2 3 9 8, rank 1 reads 6 7 5 0 1: dealt out like cards

Rule.  Rank r takes the positions r, r + n, r + 2n, ... of an order that depends on seed
and epoch only. No rank has to ask another.

Worked example.  With batches of 2 on each rank, the first step sees 4 2 and 6 7. That
is the batch 4 6 2 7 of one process with batches of 4: as a set, the i-th batches of all
ranks together are the i-th batch of a single process. Hence DDP can equal it exactly.

Invariants.
1.  Training wants equally many samples on all ranks, for a rank with an extra batch
    would wait for the others for ever: the order is padded from its start (or cut, with
    drop_last). Evaluation wants each sample once: pad=False.
2.  What a file says about its size is checked against its length before memory of that
    size is asked for.

Cost.  A batch of a TensorDataset is one fancy index per array; any other dataset costs
a Python call per sample.

In PyTorch: `torch.utils.data` and its `DistributedSampler`.

Left out:
- worker processes, for the batches here take microseconds;
- transformations and downloads: write a Dataset, or hand over arrays.
"""

import gzip
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from minddp.autograd import Tensor, as_tensor
from minddp.device import Array, generator
from minddp.environment import seat
from minddp.errors import UsageError

log = logging.getLogger("minddp")

# ---- Datasets ----


class Dataset(Protocol):
    """Anything with a length and an item for every index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class TensorDataset:
    """Tensors or arrays of equal length; item i is the tuple of their i-th rows."""

    def __init__(self, *tensors: Any):
        self.tensors = tuple(as_tensor(x) for x in tensors)
        lengths = [len(x) for x in self.tensors]
        if len(set(lengths)) != 1:
            raise UsageError(f"TensorDataset: the lengths {lengths} must be equal")

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        """One row of each, or many: index is an int, a slice or an array of ints."""
        return tuple(x[index] for x in self.tensors)


class Subset:
    """Those samples of a dataset that have these indices."""

    def __init__(self, dataset: Any, indices: Sequence[int]):
        self.dataset, self.indices = dataset, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


def random_split(dataset: Any, lengths: Sequence[float]) -> list[Subset]:
    """The dataset in parts of these lengths, or shares of 1, in a random order.

    The order is the host generator's: seed it alike on all ranks.
    """
    n = len(dataset)
    counts = [int(length) for length in lengths]
    if all(0 < length < 1 for length in lengths) and abs(sum(lengths) - 1) < 1e-9:
        counts = [int(length * n) for length in lengths]
        for i in range(n - sum(counts)):
            counts[i % len(counts)] += 1
    if sum(counts) != n or min(counts, default=0) < 0:
        raise UsageError(
            f"random_split: {lengths} are neither lengths that add up to {n} nor "
            "shares that add up to 1"
        )
    order = generator().permutation(n).tolist()
    ends = np.cumsum([0, *counts]).tolist()
    return [Subset(dataset, order[a:b]) for a, b in pairwise(ends)]


def load_digits(split: str | None = None) -> TensorDataset:
    """Handwritten digits: images (N, 64), float32 in [0, 1], and labels (N,), int64.

    1,797 images of 8 x 8 pixels, written by 13 people, in a fixed random order.
    "train" is the first 1,440, a number that 2, 3, 4, 5, 6 and 8 ranks share evenly,
    "test" the last 357, None all. Source and licence: digits.LICENSE.txt.
    """
    parts = {
        "train": slice(None, TRAIN_DIGITS),
        "test": slice(TRAIN_DIGITS, None),
        None: slice(None),
    }
    if split not in parts:
        raise UsageError(f"load_digits: split is 'train' or 'test', not {split!r}")
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, labels = file["images"][parts[split]], file["labels"][parts[split]]
    return TensorDataset(images.astype("float32") / 16, labels.astype("int64"))


TRAIN_DIGITS = 1440


# ---- Files in MNIST's format ----

# The third byte of the file names the type of the numbers, which are big-endian.
IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def load_idx(path: str | os.PathLike[str]) -> Array:
    """The array in an IDX file, the format of MNIST; also from a .gz file.

        0 0 type ndim | size of axis 0 | ... | size of the last axis | numbers
          4 bytes     |    4 bytes     |     |        4 bytes        |

    Raises UsageError that names the file and the field if they do not fit together.
    """
    open_file = gzip.open if str(path).endswith(".gz") else open
    with open_file(path, "rb") as file:
        try:
            return _read_idx(file, str(path))
        except (gzip.BadGzipFile, zlib.error, EOFError) as exc:
            raise UsageError(f"{path}: not a whole gzip file: {exc}") from exc


def _read_idx(file: Any, path: str) -> Array:
    magic = _read(file, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_TYPES:
        raise UsageError(f"{path}: magic number is {magic.hex()}, so no IDX file")
    dtype, ndim = np.dtype(IDX_TYPES[magic[2]]), magic[3]
    sizes = _read(file, 4 * ndim)
    if len(sizes) < 4 * ndim:
        raise UsageError(f"{path}: ends within the {ndim} sizes of the header")
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    expected = math.prod(shape) * dtype.itemsize
    numbers = _read(file, expected + 1)  # one more, to see whether there is more
    if len(numbers) != expected:
        there = "more" if len(numbers) > expected else f"{len(numbers):,}"
        raise UsageError(
            f"{path}: the sizes {shape} ask for {expected:,} bytes of data, but there "
            f"are {there}"
        )
    try:
        array = np.frombuffer(numbers, dtype).reshape(shape)
    except ValueError as exc:  # more than 64 axes, or 0 times far too many numbers
        raise UsageError(f"{path}: no array has the sizes {shape}: {exc}") from exc
    return array.astype(dtype.newbyteorder("="))


def _read(file: BinaryIO, limit: int) -> bytes:
    """Up to limit bytes. In pieces: `file.read(limit)` would allocate them at once,
    though the limit comes from a header that may be wrong."""
    pieces: list[bytes] = []
    while limit > 0 and (piece := file.read(min(limit, 1 << 20))):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


# ---- Who gets which sample ----


class DistributedSampler:
    """The indices of one rank's samples: positions r, r + n, ... of a common order.

    Without num_replicas and rank it looks for the launcher's variables
    (environment.py), and without a launcher it takes itself for the only process. Call
    `set_epoch` before each epoch, or every epoch has the order of the first, of which a
    line in the log warns.

    In PyTorch: `torch.utils.data.DistributedSampler`, which has no pad=False.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
    ):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, _whole("seed", seed)
        self.drop_last, self.pad, self.epoch = drop_last, pad, 0
        self._used = -1  # the epoch of the latest order
        own_rank, world_size = seat() if None in (rank, num_replicas) else (0, 1)
        n = world_size if num_replicas is None else num_replicas
        self.num_replicas = _whole("num_replicas", n, least=1)
        self.rank = _whole("rank", own_rank if rank is None else rank)
        if self.rank >= self.num_replicas:
            raise UsageError(
                f"DistributedSampler: there is no rank {self.rank} among "
                f"{self.num_replicas} replicas"
            )

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew for this epoch; the same number on every rank."""
        self.epoch = _whole("epoch", epoch)

    def indices(self) -> Array:
        """This rank's indices, as an array."""
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        return np.resize(order, self._total())[self.rank :: self.num_replicas]

    def _total(self) -> int:
        """The length of the order after padding or cutting it for all ranks."""
        length, n = len(self.dataset), self.num_replicas
        if self.drop_last:
            return length // n * n
        return math.ceil(length / n) * n if self.pad else length

    def __iter__(self) -> Iterator[int]:
        if self.shuffle and self._used == self.epoch:
            log.warning(
                "DistributedSampler gives the order of epoch %d once more; call "
                "set_epoch(epoch) before each epoch, or all have the same order",
                self.epoch,
            )
        self._used = self.epoch
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self._total(), self.num_replicas))


def _whole(name: str, value: Any, least: int = 0) -> int:
    """The value, if it is a whole number, and not a smaller one than that."""
    if not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name} is {value!r}, not a whole number from {least} up")
    return int(value)


# ---- Mini-batches ----


class DataLoader:
    """Batches of a dataset, as Tensors with a new first axis.

    The order is the sampler's. Without one, it is that of the dataset, or with
    shuffle=True another one in each epoch, drawn from `seed`, which by default comes
    from the host generator. With equal seeds it is the order of a DistributedSampler.

    `collate_fn` makes a batch of a list of samples. `num_workers` and `pin_memory` are
    accepted for torch's sake: batches are made in this process, whatever they say.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
    ):
        if shuffle and sampler is not None:
            raise UsageError("DataLoader: the sampler decides the order; omit shuffle")
        if sampler is not None and not isinstance(sampler, Sized):
            raise UsageError(
                f"DataLoader: a {type(sampler).__name__} is no sampler: it has no "
                "length, and may be empty in the next epoch. Make a list of it."
            )
        self.dataset, self.batch_size = dataset, _whole("batch_size", batch_size, 1)
        self.collate_fn, self.drop_last = collate_fn, drop_last
        self.epoch = 0
        self._own = DistributedSampler(dataset, 1, 0, shuffle, _seed(seed, shuffle))
        self.sampler: Any = self._own if sampler is None else sampler

    def __len__(self) -> int:
        samples = len(self.sampler)
        if self.drop_last:
            return samples // self.batch_size
        return math.ceil(samples / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._own.set_epoch(self.epoch)
        self.epoch += 1
        indices = np.fromiter(self.sampler, dtype=np.int64)
        for i in range(len(self)):
            yield self._batch(indices[i * self.batch_size : (i + 1) * self.batch_size])

    def _batch(self, indices: Array) -> Any:
        if isinstance(self.dataset, TensorDataset) and self.collate_fn is None:
            return self.dataset[indices]
        return (self.collate_fn or collate)([self.dataset[int(i)] for i in indices])


def _seed(seed: int | None, shuffle: bool) -> int:
    """The seed, or if one is needed and none was given, one from the host generator."""
    if seed is None and shuffle:
        return int(generator().integers(1 << 63))
    return seed or 0


def collate(samples: Sequence[Any]) -> Any:
    """One batch of many samples: tuples and dicts stay such, the rest is stacked."""
    first = samples[0]
    if isinstance(first, tuple | list):
        return tuple(collate(column) for column in zip(*samples, strict=True))
    if isinstance(first, dict):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    return Tensor(np.stack([as_tensor(sample).numpy() for sample in samples]))
