"""Checkpoints: what is saved comes back, a file is whole or refused, nothing runs."""

import builtins
import contextlib
import io
import json
import math
import os
import pickle
import re
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp import checkpoint, nn, optim
from minddp.autograd import Tensor
from minddp.checkpoint import load, save
from minddp.errors import CheckpointError, MindDPError, UsageError


def bytes_of(obj):
    file = io.BytesIO()
    save(obj, file)
    return file.getvalue()


def reloaded(obj):
    return load(io.BytesIO(bytes_of(obj)))


def same(a, b):
    """Whether a and b are equal in kind and to the bit, in all depths and in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return same(a.data, b.data)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return a == b or (a != a and b != b)


def archive(members):
    """A zip file of these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name, content in members.items():
            out.writestr(name, content)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def checkpoint_of(root, *members, **changes):
    """A checkpoint with this JSON at its root, and these bytes as arrays."""
    structure = {"version": 1, "devices": ["cpu"] * len(members), "root": root}
    arrays = {f"{i}.npy": content for i, content in enumerate(members)}
    return archive({"structure.json": json.dumps(structure | changes)} | arrays)


def refusal(content, error=CheckpointError):
    """What load says about these bytes."""
    with pytest.raises(error) as caught:
        load(io.BytesIO(content))
    return str(caught.value)


# ---- Round trips ----

ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(10)[::-2],
    np.float32([[1, 2], [3, 4]]).T,
    np.array(3, "int8"),
    np.zeros((0, 4), "float16"),
    np.array([True, False]),
    np.array([1, 2], ">f4"),
    np.array([np.nan, -np.inf, -0.0]),
    np.array([1 + 2j]),
    np.array(["", "naïve"]),
    np.array(["2020-01-01"], "M8[D]"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from([np.float32(0.1), np.float64("nan"), np.float16("-inf")]),
    st.sampled_from([np.int64(-1), np.uint64(2**64 - 1), np.bool(True)]),
    st.sampled_from(ARRAYS),
    st.sampled_from([x for x in ARRAYS if x.dtype.kind in "biuf"]).map(Tensor),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 3))
OBJECTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(OBJECTS)
def test_what_is_saved_comes_back_in_kind_order_and_bits(obj):
    assert same(reloaded(obj), obj)


def test_integer_keys_stay_integers_beside_strings_of_the_same_look():
    assert same(reloaded({1: "a", "1": "b"}), {1: "a", "1": "b"})


def test_a_dict_that_looks_like_the_format_stays_itself():
    obj = {"tensor": 0, "x": {"dict": [["a", 1]]}, "y": {"float": "inf"}}
    assert same(reloaded(obj), obj)


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    def setting():
        model = nn.Linear(3, 2)
        return model, optim.Adam(model.parameters(), lr=0.1, betas=(0.5, 0.9))

    def step(model, optimizer):
        optimizer.zero_grad()
        model(np.ones((4, 3), "float32")).sum().backward()
        optimizer.step()

    model, optimizer = setting()
    step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(state, tmp_path / "ck.pt")
    step(model, optimizer)

    model2, optimizer2 = setting()
    state = load(tmp_path / "ck.pt", map_location="cpu", weights_only=True)
    model2.load_state_dict(state["model"])
    optimizer2.load_state_dict(state["optimizer"])
    step(model2, optimizer2)
    assert same(model2.state_dict(), model.state_dict())
    assert same(optimizer2.state_dict(), optimizer.state_dict())


def test_a_parameter_comes_back_as_a_tensor_that_can_be_written_to():
    [x] = reloaded([nn.Parameter([1.0, 2.0])])
    assert type(x) is Tensor and not x.requires_grad
    x.data[0] = 5


def test_a_tied_array_is_saved_once_and_still_tied_after_loading():
    w = np.ones(1000)
    obj = {"a": Tensor(w), "b": [Tensor(w)], "c": w, "d": np.ones(1000)}
    content = bytes_of(obj)
    assert len(content) < 3 * w.nbytes
    out = load(io.BytesIO(content))
    assert out["a"].data is out["b"][0].data is out["c"]
    assert out["d"] is not out["c"]


def test_equal_states_give_equal_bytes_at_any_time(monkeypatch):
    def state():
        return {"w": np.arange(3.0), 0: Tensor([1.0])}

    now = bytes_of(state())
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert bytes_of(state()) == now


def test_numpy_opens_the_file(tmp_path):
    save({"w": Tensor([1.0, 2.0]), "step": 3}, tmp_path / "ck.npz")
    with np.load(tmp_path / "ck.npz", allow_pickle=False) as file:
        assert set(file) == {"structure.json", "0"}
        assert file["0"].tolist() == [1, 2]
        assert json.loads(file["structure.json"])["root"]["dict"][1] == ["step", 3]


# ---- What cannot be saved ----


class Config:
    pass


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        ({"optimizer": [0, 1, 2, {3}]}, r"obj['optimizer'][3] is a set. "),
        ({1: (Config(),)}, "obj[1][0] is a Config. "),
        ({"a": {2.5: 0}}, "obj['a'] has the key 2.5, a float"),
        ({True: 0}, "has the key True, a bool"),
        ({np.int64(1): 0}, "a int64"),
        (np.array([None]), "obj is a ndarray of object"),
        (np.zeros(2, "f4,f4"), "obj is a ndarray of [('f0'"),
        (np.ma.array([1, 2], mask=[0, 1]), "obj is a MaskedArray of int64"),
        (1j, "obj is a complex"),
        (b"bytes", "obj is a bytes"),
        ([nn.Linear(2, 2)], "obj[0] is a Linear: save its state_dict()"),
    ],
)
def test_what_cannot_be_saved_is_named_and_the_old_file_untouched(tmp_path, obj, text):
    path = tmp_path / "ck.pt"
    save("old", path)
    with pytest.raises(UsageError, match=re.escape(text)):
        save(obj, path)
    assert load(path) == "old"
    assert os.listdir(tmp_path) == ["ck.pt"]


def test_an_object_that_contains_itself_is_refused():
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(UsageError, match=r"obj\['a'\]\[0\]\['a'\].*contain itself"):
        save(state, io.BytesIO())


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"": x}])
def test_the_deepest_object_that_can_be_saved_can_be_loaded(wrap):
    obj = 1
    for _ in range(checkpoint.DEEPEST):
        obj = wrap(obj)
    assert reloaded(obj) == obj
    with pytest.raises(UsageError):
        bytes_of(wrap(obj))


@pytest.mark.parametrize("file", [3, None, io.StringIO()])
def test_what_is_no_file_is_refused(file):
    for call in (lambda: save(1, file), lambda: load(file)):
        with pytest.raises(UsageError, match="a file is a path"):
            call()


# ---- Files ----


@pytest.mark.parametrize("kind", [str, os.fsencode, lambda path: path])
def test_the_file_has_the_name_that_was_given(tmp_path, kind):
    save([1], kind(tmp_path / "model.pt"))
    assert os.listdir(tmp_path) == ["model.pt"]
    assert load(kind(tmp_path / "model.pt")) == [1]


def test_a_name_of_the_greatest_length_can_be_saved(tmp_path):
    save(1, tmp_path / ("é" * 127))
    assert load(tmp_path / ("é" * 127)) == 1


def test_the_new_file_is_complete_and_on_disk_before_it_replaces_the_old(
    tmp_path, monkeypatch
):
    path, done = tmp_path / "ck.pt", []
    save("old", path)
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd):
        fsync(fd)
        done.append(os.fstat(fd).st_size)

    def watched_replace(source, target):
        assert os.path.dirname(source) == str(tmp_path)
        assert load(source) == "new" and load(path) == "old"
        assert done == [os.path.getsize(source)]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    save("new", path)
    assert load(path) == "new"


@pytest.mark.parametrize("where", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_exception_leaves_the_old_file_and_no_litter(
    tmp_path, monkeypatch, where, error
):
    def fail(*args):
        raise error

    save("old", tmp_path / "ck.pt")
    with monkeypatch.context() as patch:
        patch.setattr(os, where, fail)
        with pytest.raises(type(error)):
            save("new", tmp_path / "ck.pt")
    assert load(tmp_path / "ck.pt") == "old"
    assert os.listdir(tmp_path) == ["ck.pt"]


def test_a_kill_leaves_the_old_file(tmp_path):
    save("old", tmp_path / "ck.pt")
    program = (
        "import os, signal, sys\n"
        "from minddp.checkpoint import save\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "save('new', sys.argv[1])"
    )
    job = subprocess.run([sys.executable, "-c", program, tmp_path / "ck.pt"])
    assert job.returncode == -9
    assert load(tmp_path / "ck.pt") == "old"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "last.pt").symlink_to("runs/1.pt")  # which does not exist yet
    for value in (1, 2):
        save(value, tmp_path / "last.pt")
        assert (tmp_path / "last.pt").is_symlink()
        assert load(tmp_path / "runs" / "1.pt") == value
    assert os.listdir(tmp_path / "runs") == ["1.pt"]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_permissions_are_those_of_any_new_file_or_of_the_old_one(tmp_path):
    save(1, tmp_path / "ck.pt")
    (tmp_path / "other").touch()
    assert mode(tmp_path / "ck.pt") == mode(tmp_path / "other")
    (tmp_path / "ck.pt").chmod(0o640)
    save(2, tmp_path / "ck.pt")
    assert mode(tmp_path / "ck.pt") == 0o640


def test_what_is_no_regular_file_is_written_to_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append(load(tmp_path / "pipe")))
    reader.start()
    save({"w": np.arange(3)}, tmp_path / "pipe")
    reader.join(10)
    assert same(got, [{"w": np.arange(3)}])
    assert os.listdir(tmp_path) == ["pipe"]
    (tmp_path / "null").symlink_to(os.devnull)
    save({"w": np.arange(3)}, tmp_path / "null")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_folder_that_is_missing_or_in_the_way_is_named_as_given(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no/ck\.pt'$"):
        save(1, tmp_path / "no" / "ck.pt")
    with pytest.raises(IsADirectoryError):
        save(1, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_missing_file_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "ck.pt")


def test_an_open_file_is_used_from_where_it_stands():
    file = io.BytesIO()
    file.write(b"header")
    save({"w": np.arange(3)}, file)
    file.seek(len(b"header"))
    assert same(load(file), {"w": np.arange(3)})
    assert same(load(io.BytesIO(file.getvalue()[6:])), {"w": np.arange(3)})
    file.seek(0)
    with pytest.raises(CheckpointError, match="begins with b'header'"):
        load(file)


def test_a_forgotten_seek_is_pointed_out():
    file = io.BytesIO()
    save(1, file)
    with pytest.raises(CheckpointError, match=r"BytesIO .*seek\(0\)"):
        load(file)


def test_the_first_of_two_checkpoints_is_not_taken_for_the_second():
    file = io.BytesIO()
    save("first", file)
    second = file.tell()
    save("second", file)
    file.seek(second)
    assert load(file) == "second"
    assert "one file holds one checkpoint" in refusal(file.getvalue())


# ---- Damaged files ----

STATE = {"w": np.arange(4, dtype="float32"), 0: (float("inf"), np.int8(3)), "s": "text"}


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "ck.pt").write_bytes(bytes_of(STATE)[:-9])
    with pytest.raises(CheckpointError, match=r"ck\.pt cannot .* cut short") as caught:
        load(tmp_path / "ck.pt")
    assert isinstance(caught.value, MindDPError)
    assert not isinstance(caught.value, UsageError)


def test_every_truncation_is_noticed():
    content = bytes_of(STATE)
    for length in range(len(content)):
        refusal(content[:length])


@pytest.mark.filterwarnings("ignore:Reading .*npy")
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_changed_byte_is_noticed_or_makes_no_difference(flip):
    content = bytes_of(STATE)
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= flip
        with contextlib.suppress(CheckpointError):
            assert same(load(io.BytesIO(changed)), STATE)


@given(st.binary(), st.sampled_from([b"", b"PK\3\4", b"PK\5\6" + bytes(18)]))
def test_random_bytes_are_refused(content, magic):
    refusal(magic + content)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["dict", "tuple", "float", "scalar", "array", "tensor"]
                ),
                inner,
                max_size=2,
            )
        ),
    )
)
def test_a_structure_of_any_kind_is_understood_or_refused(root):
    with contextlib.suppress(CheckpointError):
        load(io.BytesIO(checkpoint_of(root, npy(np.ones(2)))))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "nothing follows byte 0"),
        (pickle.dumps({"w": 1}, 2), "torch.load"),
        (pickle.dumps({"w": 1}), "a pickle"),
        (archive({"m/data.pkl": pickle.dumps(1), "m/version": b"3"}), "torch.load"),
        (npy(np.ones(2)), "single array"),
        (archive({"x.npy": npy(np.ones(2))}), "without structure.json"),
        (archive({}), "PK"),
        (checkpoint_of(1, version=2), "version is 2"),
        (checkpoint_of({"array": 0}), "0.npy, which is missing"),
        (checkpoint_of({"tensor": 1}, npy(np.ones(1))), "1.npy, which is missing"),
        (checkpoint_of({"array": -1}, npy(np.ones(1))), "-1.npy, which is missing"),
        (checkpoint_of({"array": "x/../0"}, npy(np.ones(1))), "which is missing"),
        (checkpoint_of({"tensor": 0}, npy(np.array(["a"]))), "'tensor' of <U1"),
        (checkpoint_of({"tensor": 0}, npy(np.ones(1, "f4,f4"))), "0.npy has"),
        (checkpoint_of({"array": 0}, npy(np.ones(1)), devices=[]), "IndexError"),
        (checkpoint_of({"scalar": ["V999999999", 1]}), "scalar of"),
        (checkpoint_of({"scalar": ["<i1", 10**9]}), "OverflowError"),
        (checkpoint_of({"lambda": 0}, npy(np.ones(1))), "'lambda'"),
        (archive({"structure.json": "[" * 100_000}), "RecursionError"),
        (archive({"structure.json": "{"}), "JSONDecodeError"),
        (archive({"structure.json": "[]"}), "TypeError"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_its_reason(content, text):
    assert text in refusal(content)


def test_a_pickled_array_in_a_checkpoint_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return builtins.open, (str(tmp_path / "sprung"), "w")

    file = io.BytesIO()
    np.save(file, np.array([Trap()]), allow_pickle=True)
    refusal(checkpoint_of({"array": 0}, file.getvalue()))
    assert os.listdir(tmp_path) == []


# ---- Files that claim to be large ----


def header(shape, descr="<f8"):
    """A .npy header of any claim."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode()


def patched(content, name, size):
    """The archive, whose directory claims that a stored member has this size."""
    at = content.rindex(name.encode()) - 46  # its entry in the central directory
    claim = size.to_bytes(4, "little")
    return content[: at + 20] + claim * 2 + content[at + 28 :]


GIGABYTE = 1 << 30
BOMBS = {
    "header": checkpoint_of({"array": 0}, header((GIGABYTE // 8,)) + bytes(8)),
    "overflow": checkpoint_of({"array": 0}, header((2**32, 2**32)) + bytes(8)),
    "negative": checkpoint_of({"array": 0}, header((-1, -1)) + bytes(8)),
    "zero, then overflow": checkpoint_of({"array": 0}, header((0, 10**30))),
    "nested header": checkpoint_of({"array": 0}, header("-" * 9000 + "1")),
    "directory": patched(
        checkpoint_of({"array": 0}, header((GIGABYTE // 8,))),
        "0.npy",
        GIGABYTE + len(header((GIGABYTE // 8,))),
    ),
    "structure": patched(checkpoint_of(1), "structure.json", GIGABYTE),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_claim_of_size_is_not_believed(name):
    tracemalloc.start()
    try:
        refusal(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < GIGABYTE / 16
    finally:
        tracemalloc.stop()


def test_a_compressed_member_is_refused():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("structure.json", '{"version": 1, "devices": [], "root": 1}')
    assert "compressed" in refusal(file.getvalue())


def test_members_that_overlap_are_refused():
    """Ten names for one megabyte: each agrees with its header, all with no file."""
    content = checkpoint_of([{"array": 0}], npy(np.zeros(1 << 20, "u1")))
    file = io.BytesIO(content)
    with zipfile.ZipFile(file, "a") as out:
        for _ in range(9):
            out.filelist.append(out.getinfo("0.npy"))
        out._didModify = True
    assert "longer than the file" in refusal(file.getvalue())


# ---- Devices ----


@pytest.fixture
def from_gpu(monkeypatch):
    """A checkpoint of one array that was, so it says, on a GPU."""
    monkeypatch.setattr(checkpoint, "device_of", lambda x: "cuda:0")
    return bytes_of([Tensor([1.0])])


@pytest.mark.parametrize("location", ["cpu", Tensor(0).device, {"cuda:0": "cpu"}])
def test_map_location_says_where_arrays_go(from_gpu, location):
    [x] = load(io.BytesIO(from_gpu), map_location=location)
    assert x.data.tolist() == [1] and str(x.device) == "cpu"


@pytest.mark.parametrize("location", [None, {"cuda:0": "cuda:1"}, {"cuda:1": "cpu"}])
def test_a_device_that_cannot_be_used_is_no_fault_of_the_file(
    from_gpu, location, monkeypatch
):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(
        UsageError, match=r"saved from cuda:0 cannot go to cuda:.*'cpu'"
    ):
        load(io.BytesIO(from_gpu), map_location=location)


def test_a_bad_map_location_is_noticed_before_the_file_is_opened():
    with pytest.raises(UsageError, match="gpu"):
        load("missing.pt", map_location="gpu")


def test_infinity_and_nan_are_written_as_json_that_others_can_read():
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    content = bytes_of([math.inf, -math.inf, math.nan, np.float32("inf")])
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        json.loads(file.read("structure.json"), parse_constant=refuse)
