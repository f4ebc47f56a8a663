"""Checkpoints: nested state to a file and back, as arrays plus JSON, never as pickle.

    {"model": {"w": W, "tied": W},          model.pt, an ordinary .npz archive
     "step": 7}                             |-- structure.json   says what goes where
         |                                  '-- 0.npy            W, once
         '------- save ------->
         <------- load --------

A pickle is a program: who reads one runs what its writer liked. Here a reader gets data
and nothing else. `unzip -p model.pt structure.json` shows the structure, and
`numpy.load("model.pt")["0"]` an array.

Worked example.  The structure of the state above:

    {"dict": [["model", {"dict": [["w", {"tensor": 0}], ["tied", {"tensor": 0}]]}],
              ["step", 7]]}

A dict is a list of pairs, because the keys of a JSON object are strings, and those of
an optimizer's state are integers. All else that JSON lacks is an object with one name:
tuple, float (inf and nan), scalar, array, tensor.

Invariants.
1.  The file at a path is the old one or the new one, whole, whenever save dies: it
    writes another file beside it, waits for the disk, and renames.
2.  Equal states give equal bytes: no date and no address is saved.
3.  An array that is reached twice is saved once, and is one array after loading.
4.  Loading asks for no more memory than the file is long. A member is stored, not
    compressed, and its sizes must agree before an array is made: the one in the
    directory, the one that follows from the .npy header, and the length of the file.

Cost.  One pass over the arrays, and memory for 16 MiB of them at a time; loading asks
for the arrays themselves. Both take a few seconds for 1 GB, plus the disk.

In PyTorch: `torch.save`, and `torch.load` with `weights_only=True`
(torch/serialization.py, torch/_weights_only_unpickler.py).

Left out:
- requires_grad, grad and the class Parameter: load into a module with load_state_dict;
- subclasses of dict, list and tuple, which come back as the plain kind;
- one list or dict reached twice: it comes back as two;
- sharded checkpoints (`torch.distributed.checkpoint`): replicas are equal, so rank 0
  saves for all.
"""

import functools
import io
import json
import math
import os
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeAlias

import numpy as np

from minddp.autograd import Tensor
from minddp.device import Array, Device, array_module, device_of, to_host
from minddp.errors import CheckpointError, UsageError

VERSION = 1
STRUCTURE = "structure.json"
DEEPEST = 100  # levels of nesting; Python's own limit would differ between callers
REAL = "biuf"  # kinds of dtype that a Tensor holds
KINDS = REAL + "cmMSU"  # and an array: complex, times, bytes, text

Arrays: TypeAlias = dict[int, tuple[int, Array]]  # id -> (number in the file, array)
Place: TypeAlias = Callable[[str], Any]  # from where an array was to where it goes


def save(obj: Any, file: Any) -> None:
    """Write obj to a file, from which `load` makes it again.

    `obj` is any nesting of dicts (keys are strings or integers), lists and tuples, of
    numbers, strings, bools, None, arrays and Tensors. `file` is a path, or a file that
    is open for writing bytes, which is written to from its current position.

    To a path, the file is replaced at once when all is on disk. A link stays a link,
    the new file has the old one's permissions, and the name stays as given.

    Raises UsageError, before a file is touched, that names what cannot be saved.
    """
    numbered: Arrays = {}
    root = _encode(obj, (), numbered)
    arrays = [x for _, x in numbered.values()]
    devices = [str(device_of(x)) for x in arrays]
    text = json.dumps({"version": VERSION, "devices": devices, "root": root})
    if isinstance(file, str | bytes | os.PathLike):
        with _replacing(os.fsdecode(file)) as stream:
            _write(stream, text, arrays)
    else:
        _check_stream(file, "write")
        _write(file, text, arrays)


def load(file: Any, map_location: Any = None, *, weights_only: bool = True) -> Any:
    """What `save` wrote to this path, or to this open file at its current position.

    Arrays go to the device they were saved from, or to `map_location`: a device, or a
    dict such as {"cuda:0": "cuda:1"} from old to new. `weights_only` is accepted for
    PyTorch's sake and makes no difference: loading never runs code.

    Raises FileNotFoundError if there is no such file, CheckpointError if it is damaged
    or something else, and UsageError if a device cannot be used.
    """
    place = _place(map_location)
    if isinstance(file, str | bytes | os.PathLike):
        with open(file, "rb") as stream:
            return _load(stream, os.fsdecode(file), place)
    _check_stream(file, "read")
    return _load(file, str(getattr(file, "name", type(file).__name__)), place)


def _check_stream(file: Any, method: str) -> None:
    if isinstance(file, io.TextIOBase) or not hasattr(file, method):
        raise UsageError(
            f"checkpoint: a file is a path, or a file that is open to {method} bytes, "
            f"not {file!r}"
        )


# ---- To JSON and back ----


def _encode(x: Any, path: tuple[Any, ...], arrays: Arrays) -> Any:
    """x as JSON; its arrays are added to `arrays` and appear as their numbers there.

    `path` holds the keys that lead from the outermost object to x.
    """
    if len(path) > DEEPEST:
        raise UsageError(
            f"save: {_spelled(path[:3])}... is nested deeper than {DEEPEST} levels. "
            "Does it contain itself?"
        )
    if isinstance(x, dict):
        _check_keys(x, path)
        return {"dict": [[k, _encode(v, (*path, k), arrays)] for k, v in x.items()]}
    if isinstance(x, list | tuple):
        nodes = [_encode(v, (*path, i), arrays) for i, v in enumerate(x)]
        return nodes if isinstance(x, list) else {"tuple": nodes}
    if type(x) is float and not math.isfinite(x):
        return {"float": str(x)}
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, np.generic) and x.dtype.kind in REAL and x.dtype.itemsize <= 8:
        return {"scalar": [x.dtype.str, _encode(x.item(), path, arrays)]}
    if isinstance(x, Tensor):
        return {"tensor": _number(x.data, arrays)}
    if _is_array(x) and x.dtype.kind in KINDS:
        return {"array": _number(x, arrays)}
    raise UsageError(f"save: {_spelled(path)} is {_described(x)}")


def _decode(node: Any, array: Callable[[int], Array]) -> Any:
    """What was encoded; `array(i)` is the array with number i."""
    if isinstance(node, list):
        return [_decode(v, array) for v in node]
    if not isinstance(node, dict):
        return node
    [(kind, value)] = node.items()
    if kind == "dict":
        return {k: _decode(v, array) for k, v in value}
    if kind == "tuple":
        return tuple([_decode(v, array) for v in value])
    if kind == "float":
        return float(value)
    if kind == "scalar":
        dtype = np.dtype(value[0])
        if dtype.kind not in REAL:
            raise ValueError(f"a scalar of {dtype}")
        return dtype.type(_decode(value[1], array))
    x = array(value)
    if kind == "tensor" and x.dtype.kind in REAL:
        return Tensor(x)
    if kind == "array":
        return x
    raise ValueError(f"{STRUCTURE} has a {kind!r} of {x.dtype}")


def _number(x: Array, arrays: Arrays) -> int:
    """The number of x: a new one, unless this very array has been met before."""
    return arrays.setdefault(id(x), (len(arrays), x))[0]


def _is_array(x: Any) -> bool:
    """An ordinary array: of a masked one, say, half would be lost."""
    return type(x) in (np.ndarray, np.memmap) or array_module(x) is not np


def _check_keys(x: dict[Any, Any], path: tuple[Any, ...]) -> None:
    for key in x:
        if type(key) not in (str, int):
            raise UsageError(
                f"save: {_spelled(path)} has the key {key!r}, a {type(key).__name__}. "
                "Keys are strings or integers."
            )


def _spelled(path: tuple[Any, ...]) -> str:
    return "obj" + "".join(f"[{key!r}]" for key in path)


def _described(x: Any) -> str:
    kind = f"a {type(x).__name__}" + (f" of {x.dtype}" if hasattr(x, "dtype") else "")
    if hasattr(x, "state_dict"):
        return f"{kind}: save its state_dict(), and load with load_state_dict"
    return (
        f"{kind}. A checkpoint holds dicts, lists, tuples, numbers, strings, bools, "
        "None, plain arrays and Tensors: convert it to one of them."
    )


# ---- Writing ----


def _write(stream: IO[bytes], text: str, arrays: list[Array]) -> None:
    """The archive, from the stream's current position on."""
    with zipfile.ZipFile(stream, "w") as archive:  # ZIP_STORED
        archive.writestr(zipfile.ZipInfo(STRUCTURE), text)  # a ZipInfo has no date
        for i, x in enumerate(arrays):
            info = zipfile.ZipInfo(f"{i}.npy")
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, to_host(x), allow_pickle=False)


@contextmanager
def _replacing(path: str) -> Iterator[IO[bytes]]:
    """A stream whose content becomes the file at `path`, if the body succeeds."""
    if os.path.exists(path) and not os.path.isfile(path):
        # A pipe or /dev/null is not to be replaced, and has no positions to ask for.
        with open(path, "wb") as special, io.BytesIO() as content:
            yield content
            special.write(content.getbuffer())
        return
    path = os.path.realpath(path)  # the target of a link, so that the link stays
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(4)}.tmp")
    try:
        stream = open(beside, "xb")  # noqa: SIM115
    except OSError as exc:
        exc.filename = path  # no such folder, say: name what the user knows
        raise
    try:
        with stream:
            with suppress(FileNotFoundError):
                shutil.copymode(path, beside)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


# ---- Reading ----


def _load(stream: IO[bytes], name: str, place: Place) -> Any:
    """What the stream holds from its position on; CheckpointError names it as `name`.

    Whatever is raised while untrusted bytes are read means that they are bad. Two are
    not: a device that cannot be used, and memory that ran out, for how much is asked
    for has been checked.
    """
    try:
        archive, size = _opened(stream)
        with archive:
            _check_members(archive, size)
            structure = json.loads(archive.read(STRUCTURE))
            if structure["version"] != VERSION:
                raise ValueError(
                    f"its version is {structure['version']!r}, this minddp reads "
                    f"{VERSION}"
                )
            arrays = functools.cache(
                lambda i: _placed(_read(archive, i), structure["devices"][i], place)
            )
            return _decode(structure["root"], arrays)
    except (UsageError, MemoryError):
        raise
    except Exception as exc:
        reason = str(exc) if type(exc) is ValueError else repr(exc)
        raise CheckpointError(
            f"load: {name} cannot be read as a checkpoint: {reason}"
        ) from exc


def _opened(stream: IO[bytes]) -> tuple[zipfile.ZipFile, int]:
    """The archive that begins at the stream's position, and how long it can be."""
    if not stream.seekable():
        stream = io.BytesIO(stream.read())
    start = stream.tell()
    head = stream.read(6)
    size = stream.seek(0, io.SEEK_END) - start
    for magic, reason in _FOREIGN.items():
        if head.startswith(magic):
            raise ValueError(reason)
    if not head:
        raise ValueError(f"nothing follows byte {start}. Is a seek(0) missing?")
    if not head.startswith(b"PK\3\4"):
        raise ValueError(f"it begins with {head!r}, unlike any zip archive")
    try:
        archive = zipfile.ZipFile(stream)
    except zipfile.BadZipFile as exc:
        raise ValueError(f"it was cut short or damaged: {exc}") from exc
    first = min((info.header_offset for info in archive.infolist()), default=start)
    if first != start:
        raise ValueError(
            f"the archive at its end begins at byte {first}, not {start}: one file "
            "holds one checkpoint"
        )
    return archive, size


def _check_members(archive: zipfile.ZipFile, size: int) -> None:
    """Members are what `save` writes, and together no longer than the file."""
    names = archive.namelist()
    if any(name.endswith("data.pkl") for name in names):
        raise ValueError(_TORCH)
    if STRUCTURE not in names:
        raise ValueError(
            f"it is a zip archive without {STRUCTURE}. If numpy.savez made it, use "
            "numpy.load."
        )
    members = archive.infolist()
    for info in members:
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} is compressed, which save never does")
    if sum(info.file_size for info in members) > size:
        raise ValueError(f"its members claim to be longer than the file, {size:,} B")


def _read(archive: zipfile.ZipFile, number: int) -> Array:
    """The array with this number, once its header and its length agree."""
    name = f"{number}.npy"
    try:
        claimed = archive.getinfo(name).file_size
    except KeyError:
        raise ValueError(f"{STRUCTURE} refers to {name}, which is missing") from None
    with archive.open(name) as member:
        if np.lib.format.read_magic(member) != (1, 0):
            raise ValueError(f"{name} has a header that save does not write")
        shape, _, dtype = np.lib.format.read_array_header_1_0(
            member, max_header_size=1000
        )
        length = member.tell() + math.prod(shape) * dtype.itemsize
    if dtype.kind not in KINDS or length != claimed:
        raise ValueError(f"{name} has {claimed} B, but is {dtype} of shape {shape}")
    with archive.open(name) as member:  # anew: a seek would switch the checksum off
        return np.lib.format.read_array(member, allow_pickle=False)


def _placed(x: Array, saved: str, place: Place) -> Array:
    """x, which was saved from one device, on the one it shall go to."""
    try:
        return Device(place(saved)).put(x)
    except RuntimeError as exc:  # UsageError is one, and so is CuPy's
        raise UsageError(
            f"load: an array that was saved from {saved} cannot go to {place(saved)}. "
            f"Give map_location, such as 'cpu'. {exc}"
        ) from exc


def _place(map_location: Any) -> Place:
    if map_location is None:
        return lambda saved: saved
    if isinstance(map_location, Mapping):
        return lambda saved: map_location.get(saved, saved)
    device = Device(map_location)
    return lambda saved: device


_TORCH = (
    "torch.save wrote it, as a pickle, which minddp does not run. Where PyTorch is "
    "installed, load it with torch.load(path, map_location='cpu', weights_only=True), "
    "replace each tensor t in it by t.detach().numpy(), and minddp.save the result."
)
_FOREIGN = {
    **{
        bytes([0x80, protocol]): f"it is a pickle. {_TORCH}" for protocol in range(2, 6)
    },
    b"\x93NUMPY": "it is a single array: use numpy.load",
}
