"""Data: who gets which sample, batches, the digits, and files that lie."""

import gzip
import struct
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.autograd import Tensor
from minddp.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
    load_digits,
    load_idx,
    random_split,
)
from minddp.device import manual_seed
from minddp.errors import UsageError

# ---- Who gets which sample ----


def shards(length, n, **settings):
    """The samples of each of n ranks."""
    return [list(DistributedSampler(range(length), n, r, **settings)) for r in range(n)]


def test_rank_r_takes_the_positions_r_and_r_plus_n():
    assert shards(6, 2, shuffle=False) == [[0, 2, 4], [1, 3, 5]]


def test_padding_repeats_the_start_so_that_all_ranks_get_equally_many():
    assert shards(7, 3, shuffle=False) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert shards(1, 3, shuffle=False) == [[0], [0], [0]]
    assert shards(0, 3, shuffle=False) == [[], [], []]


def test_drop_last_cuts_the_end_so_that_all_ranks_get_equally_many():
    assert shards(7, 3, shuffle=False, drop_last=True) == [[0, 3], [1, 4], [2, 5]]


def test_without_padding_every_sample_comes_once():
    assert shards(7, 3, shuffle=False, pad=False) == [[0, 3, 6], [1, 4], [2, 5]]
    assert shards(1, 3, shuffle=False, pad=False) == [[0], [], []]


@given(
    length=st.integers(0, 30),
    n=st.integers(1, 5),
    drop_last=st.booleans(),
    pad=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_length_is_known_before_the_samples(length, n, drop_last, pad):
    for r in range(n):
        sampler = DistributedSampler(
            range(length), n, r, drop_last=drop_last, pad=pad, seed=3
        )
        assert len(sampler) == len(list(sampler))


@given(
    length=st.integers(0, 40),
    n=st.integers(1, 5),
    b=st.integers(1, 7),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_ith_batches_of_all_ranks_are_the_ith_batch_of_one_process(
    length, n, b, epoch, drop_last
):
    """Why n ranks with batches of b can equal one process with batches of n * b."""
    if drop_last:
        length = length // n * n

    def batches(world_size, rank, batch_size):
        sampler = DistributedSampler(
            range(length), world_size, rank, seed=7, drop_last=drop_last, pad=False
        )
        sampler.set_epoch(epoch)
        loader = DataLoader(
            TensorDataset(np.arange(length)), batch_size, sampler=sampler
        )
        return [x.tolist() for (x,) in loader]

    ranks = [batches(n, r, b) for r in range(n)]
    for i, whole in enumerate(batches(1, 0, n * b)):
        parts = [rank[i] for rank in ranks if i < len(rank)]
        assert sorted(chain(*parts)) == sorted(whole)


def test_shuffling_depends_on_seed_and_epoch_only():
    def order(seed, epoch, rank=0):
        sampler = DistributedSampler(range(20), 2, rank, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 1) != order(1, 0)  # seed + epoch would make these two equal
    assert sorted(order(0, 0, rank=0) + order(0, 0, rank=1)) == list(range(20))


def test_rank_and_world_size_come_from_the_environment(monkeypatch):
    assert list(DistributedSampler(range(3), shuffle=False)) == [0, 1, 2]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(DistributedSampler(range(4), shuffle=False)) == [1, 3]
    with pytest.raises(UsageError, match="no rank 2 among 2"):
        DistributedSampler(range(4), rank=2)


# ---- Batches ----


def test_batches_are_tensors_with_a_new_first_axis():
    data = TensorDataset(np.arange(10).reshape(5, 2), np.arange(5))
    batches = list(DataLoader(data, batch_size=2))
    assert [x.shape for x, y in batches] == [(2, 2), (2, 2), (1, 2)]
    assert all(isinstance(x, Tensor) and isinstance(y, Tensor) for x, y in batches)
    assert [y.tolist() for _, y in batches] == [[0, 1], [2, 3], [4]]
    assert len(DataLoader(data, batch_size=2)) == 3
    assert len(DataLoader(data, batch_size=2, drop_last=True)) == 2
    assert len(list(DataLoader(data, batch_size=2, drop_last=True))) == 2


def test_any_dataset_with_length_and_items_will_do():
    class Squares:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return {"x": np.full(2, i), "pair": (i, float(i * i))}

    batch = next(iter(DataLoader(Squares(), batch_size=4)))
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert batch["pair"][0].tolist() == [0, 1, 2, 3]
    assert batch["pair"][1].tolist() == [0, 1, 4, 9]
    listed = DataLoader(Squares(), batch_size=2, collate_fn=len)
    assert list(listed) == [2, 2]


def test_a_generic_dataset_gives_the_batches_of_an_array_dataset():
    data = TensorDataset(np.arange(10).reshape(5, 2), np.arange(5))
    items = [data[i] for i in range(5)]
    for fast, slow in zip(DataLoader(data, 2), DataLoader(items, 2), strict=True):
        assert [t.tolist() for t in fast] == [t.tolist() for t in slow]


def test_shuffling_differs_between_epochs_and_repeats_with_the_seed():
    data = TensorDataset(np.arange(20))

    def epochs(loader):
        return [[x.tolist() for (x,) in loader] for _ in range(2)]

    a = epochs(DataLoader(data, 5, shuffle=True, seed=1))
    assert a == epochs(DataLoader(data, 5, shuffle=True, seed=1))
    assert a[0] != a[1]
    manual_seed(5)
    b = epochs(DataLoader(data, 5, shuffle=True))
    manual_seed(5)
    assert b == epochs(DataLoader(data, 5, shuffle=True)) != a


def test_a_shuffling_loader_has_the_order_of_a_distributed_sampler():
    data, sampler = TensorDataset(np.arange(12)), DistributedSampler(range(12), 1, 0)
    loader = DataLoader(data, 12, shuffle=True, seed=0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert next(iter(loader))[0].tolist() == list(sampler)


def test_loaders_and_datasets_refuse_what_cannot_work():
    with pytest.raises(UsageError, match=r"\[2, 3\]"):
        TensorDataset(np.zeros(2), np.zeros(3))
    with pytest.raises(UsageError, match="batch_size"):
        DataLoader(range(3), batch_size=0)
    with pytest.raises(UsageError, match="omit shuffle"):
        DataLoader(range(3), shuffle=True, sampler=[0, 1])
    with pytest.raises(UsageError, match="generator is no sampler"):
        DataLoader(range(3), sampler=(i for i in range(3)))


@pytest.mark.parametrize("junk", [None, "2", 2.5, -1])
def test_counts_and_seeds_are_whole_numbers(junk):
    data = range(3)
    for make in (
        lambda: DataLoader(data, batch_size=junk),
        lambda: DistributedSampler(data, num_replicas=junk or "", rank=0),
        lambda: DistributedSampler(data, num_replicas=2, rank=junk or ""),
        lambda: DistributedSampler(data, seed=junk),
        lambda: DistributedSampler(data).set_epoch(junk),
    ):
        with pytest.raises(UsageError, match="whole number"):
            make()
    loader = DataLoader(data, batch_size=np.int64(2), shuffle=True, seed=np.int64(1))
    assert len(list(loader)) == 2


def test_a_dataset_of_tensors_can_be_looped_over():
    assert [y.item() for x, y in TensorDataset(np.zeros((2, 3)), [5, 6])] == [5, 6]


# ---- Digits ----


def test_the_digits_are_split_into_1440_and_357():
    train, test, whole = load_digits("train"), load_digits("test"), load_digits()
    assert (len(train), len(test), len(whole)) == (1440, 357, 1797)
    images, labels = whole.tensors
    assert images.dtype == np.float32
    assert labels.dtype == np.int64
    assert (images.data.min(), images.data.max()) == (0, 1)
    assert images.shape == (1797, 64)
    assert sorted(set(labels.tolist())) == list(range(10))
    assert train.tensors[1].tolist() + test.tensors[1].tolist() == labels.tolist()
    with pytest.raises(UsageError, match="'valid'"):
        load_digits("valid")


def test_labels_belong_to_their_images():
    """The mean image of a class is nearest to most images of that class."""
    (x, y), (test_x, test_y) = load_digits("train").tensors, load_digits("test").tensors
    means = np.stack([x.data[y.data == digit].mean(0) for digit in range(10)])
    distance = ((test_x.data[:, None] - means) ** 2).sum(-1)
    assert (distance.argmin(1) == test_y.data).mean() > 0.85


# ---- IDX files ----


def idx(array, kind, sizes=None):
    sizes = array.shape if sizes is None else sizes
    header = struct.pack(f">BBBB{len(sizes)}I", 0, 0, kind, len(sizes), *sizes)
    return header + array.tobytes()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(8, "u1"), (9, "i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")],
)
def test_idx_files_of_all_types(tmp_path, kind, dtype):
    array = np.arange(-3, 3).reshape(2, 3).astype(dtype)
    (tmp_path / "x").write_bytes(idx(array, kind))
    (tmp_path / "x.gz").write_bytes(gzip.compress(idx(array, kind)))
    for name in ("x", "x.gz"):
        loaded = load_idx(tmp_path / name)
        assert loaded.tolist() == array.tolist()
        assert loaded.dtype.isnative
        loaded[0, 0] = 1  # an array of its own, not a view of the file's bytes


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "magic"),
        (b"\x00\x00", "magic"),
        (b"\x1f\x8b\x08\x00", "magic number is 1f8b0800"),
        (b"\x00\x00\x07\x01\x00\x00\x00\x00", "magic"),
        (b"\x00\x00\x08\x03\x00\x00\x00\x01", "3 sizes"),
        (idx(np.zeros(5, "u1"), 8, (6,)), "6 bytes of data, but there are 5"),
        (idx(np.zeros(5, "u1"), 8, (4,)), "4 bytes of data, but there are more"),
        (idx(np.zeros(5, "u1"), 8, (2**32 - 1,) * 3), "bytes of data, but there are 5"),
        (idx(np.zeros(0, "u1"), 8, (0, 2**32 - 1, 2**32 - 1)), "no array has the size"),
        (idx(np.zeros(1, "u1"), 8, (1,) * 65), "no array has the size"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_idx_file_that_lies_is_refused_by_name(tmp_path, content, match, suffix):
    path = tmp_path / f"labels{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(UsageError, match=match) as caught:
        load_idx(path)
    assert str(path) in str(caught.value)


def test_a_broken_gzip_file_is_refused_by_name(tmp_path):
    path = tmp_path / "labels.gz"
    whole = gzip.compress(idx(np.zeros(1000, "u1"), 8))
    torn = whole[:12] + b"\xff" * 4 + whole[16:]  # zlib.error, which is no OSError
    for content in (b"no gzip", whole[:20], torn):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"labels\.gz"):
            load_idx(path)


def test_the_same_order_once_more_is_warned_of(caplog):
    sampler = DistributedSampler(range(10), 2, 0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(sampler)
    list(DistributedSampler(range(10), 2, 0, shuffle=False))
    assert caplog.text == ""
    list(sampler)
    assert "order of epoch 2 once more" in caplog.text


def test_a_dataset_is_split_at_random_into_parts_without_overlap():
    manual_seed(3)
    for lengths, counts in (([6, 4], [6, 4]), ([0.75, 0.25], [8, 2]), ([10], [10])):
        parts = random_split(range(10), lengths)
        assert [len(part) for part in parts] == counts
        assert sorted(x for part in parts for x in part) == list(range(10))
    assert [parts[0][i] for i in range(10)] != list(range(10))
    for wrong in ([6, 5], [0.5, 0.4], [11, -1]):
        with pytest.raises(UsageError, match="random_split"):
            random_split(range(10), wrong)
