"""A double of CuPy for machines without a GPU: its GPUs are threads.

    fakecupy.install(monkeypatch)     sys.modules has a "cupy" for the rest of this test

What it has of a GPU, since bugs hide there:
- an array of the GPU is none of the host: np.asarray, sockets, sums of both refuse it;
- a stream is a queue with a thread that works it off, late and beside other streams;
- a thread begins on GPU 0, and a stream or an event belongs to one GPU;
- NCCL (fakenccl.py) is asked by addresses, answers late, and waits for a missing rank;
- a name that is not listed below is an AttributeError.

What it has not: kernels that are late (ops wait for their own stream, and run at once;
`late` writes late), rounding, a memory pool, the null stream's barriers. Its arrays may
have the dtype BFLOAT16, where CuPy has that of ml_dtypes. What passes here is in order;
whether a GPU would do as it was told, only a GPU can say.
"""

import queue
import sys
import threading
import time
import types
import weakref
from functools import partial

import fakenccl
import numpy as np

GPUS = 8
FUNCTIONS = (
    *("absolute", "add", "all", "any", "arange", "argmax", "ascontiguousarray"),
    *(
        "broadcast_to",
        "concatenate",
        "divide",
        "empty",
        "empty_like",
        "exp",
        "full",
        "isfinite",
        "log",
    ),
    *("matmul", "max", "maximum", "may_share_memory", "mean", "minimum", "multiply"),
    *("negative", "ones", "ones_like", "result_type", "sqrt", "stack", "subtract"),
    *("sum", "tanh", "take_along_axis", "isnan", "logical_and", "not_equal"),
    *("where", "zeros", "zeros_like"),
)
CONSTANTS = ("float16", "float32", "float64", "int64", "bool_", "newaxis")
ATTRIBUTES = ("shape", "dtype", "size", "nbytes", "ndim", "itemsize", "strides", "T")
METHODS = (
    *("all", "any", "argmax", "astype", "copy", "fill", "max", "mean", "min", "ravel"),
    *("reshape", "sum", "transpose", "view"),
)
VIEWS = ("__getitem__", "ascontiguousarray", "ravel", "reshape", "transpose", "view")
SYNCHRONIZING = ("__bool__", "__float__", "__int__", "item", "tobytes", "tolist")

here = threading.local()  # this thread's GPU, and its stream on each
streams = weakref.WeakValueDictionary()  # by the address that NCCL is given


class CUDARuntimeError(RuntimeError):
    pass


class Device:
    def __init__(self, device=None):
        self.id = getattr(here, "gpu", 0) if device is None else int(device)

    def use(self):
        here.gpu = self.id

    def __enter__(self):
        here.before = [*getattr(here, "before", []), Device().id]
        self.use()

    def __exit__(self, *error):
        here.gpu = here.before.pop()


class Stream:
    def __init__(self, non_blocking=False):
        self.device_id, self.ptr = Device().id, id(self)
        self._tasks = queue.SimpleQueue()
        streams[self.ptr] = self
        threading.Thread(target=work_off, args=(self._tasks,), daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def put(self, task):
        self._tasks.put(task)

    def record(self, event=None):
        event = event or Event()
        if event.device_id != self.device_id:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle")
        event.mark = threading.Event()
        self.put(event.mark.set)
        return event

    def wait_event(self, event):
        self.put(event.mark.wait)

    def synchronize(self):
        self.record(at(self.device_id, Event)).synchronize()

    def __enter__(self):
        if self.device_id != Device().id:
            raise RuntimeError("the stream is of another device than the current one")
        here.inside = [*getattr(here, "inside", []), get_current_stream()]
        own_streams()[self.device_id] = self

    def __exit__(self, *error):
        own_streams()[self.device_id] = here.inside.pop()


def work_off(tasks):
    while task := tasks.get():
        task()


def at(gpu, make):
    with Device(gpu):
        return make()


def own_streams():
    return here.__dict__.setdefault("streams", {})


def get_current_stream():
    return own_streams().setdefault(Device().id, null_streams[Device().id])


class Event:
    def __init__(self, block=False, disable_timing=False):
        self.device_id, self.mark = Device().id, None

    def record(self, stream=None):
        (stream or get_current_stream()).record(self)

    @property
    def done(self):
        return self.mark is None or self.mark.is_set()

    def synchronize(self):
        self.mark.wait()


null_streams = [at(gpu, Stream) for gpu in range(GPUS)]


# ---- Arrays ----


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    def __init__(self, host):
        self._host, self.device = host, Device()
        self.data = types.SimpleNamespace(ptr=host.ctypes.data)

    @property
    def flags(self):  # CuPy's have no "writeable"
        names = "c_contiguous", "f_contiguous", "owndata"
        return types.SimpleNamespace(**{n: getattr(self._host.flags, n) for n in names})

    def __array__(self, *args, **kw):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *args, out=None, **kw):
        if kw.keys() - {"dtype", "casting", "axis", "keepdims"}:
            raise TypeError(f"Wrong arguments {kw}")
        return call(getattr(ufunc, method), *args, out=out and out[0], **kw)

    def __array_function__(self, function, kinds, args, kw):
        if function.__name__ not in FUNCTIONS:
            return NotImplemented
        return call(function, *args, **kw)

    def __getattr__(self, name):
        if name in ATTRIBUTES:
            return wrapped(getattr(self._host, name))
        if name in METHODS:
            return lambda *args, **kw: call(
                getattr(np.ndarray, name), self, *args, **kw
            )
        raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")

    def __getitem__(self, index):
        return call(np.ndarray.__getitem__, self, index)

    def __setitem__(self, index, values):
        if isinstance(values, np.ndarray) and values.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        get_current_stream().synchronize()
        self._host[opened(index, hosts=True)] = opened(values)

    def __len__(self):
        return len(self._host)

    def get(self):
        at(self.device.id, get_current_stream).synchronize()
        return self._host.copy()


for name in SYNCHRONIZING:
    setattr(ndarray, name, lambda x, *, of=name: getattr(x.get(), of)())


def opened(x, hosts=False):
    """The host arrays that pose as those of the GPU; real ones are refused."""
    if isinstance(x, np.ndarray) and x.ndim and not hosts:
        raise TypeError(f"Unsupported type {type(x)}")
    if isinstance(x, ndarray) and x.device.id != Device().id:
        raise ValueError(f"an array of GPU {x.device.id} on GPU {Device().id}")
    if isinstance(x, (list, tuple)):
        return type(x)(opened(item, hosts) for item in x)
    return x._host if isinstance(x, ndarray) else x


def wrapped(x):
    return ndarray(np.asanyarray(x)) if isinstance(x, np.ndarray | np.generic) else x


def call(function, *args, **kw):
    """Of the arrays of this GPU, when the current stream has come so far; views, which
    read nothing, at once."""
    out = kw.pop("out", None)
    args = opened(args, hosts=function.__name__ == "__getitem__")
    kw = {name: opened(value) for name, value in kw.items()}
    if function.__name__ in VIEWS:
        result = function(*args, **kw)
        if isinstance(result, np.ndarray) and np.may_share_memory(result, args[0]):
            return wrapped(result)
    get_current_stream().synchronize()
    if out is not None:
        function(*args, **kw, out=opened(out))
        return out
    return wrapped(function(*args, **kw))


def array(x, dtype=None, copy=True):
    """On the current GPU, from anywhere."""
    if isinstance(x, ndarray):
        same = dtype is None or dtype == x.dtype
        return x if same and not copy else x.astype(dtype or x.dtype)
    return ndarray(np.array(x, dtype))


def late(x, values, seconds=0.05):
    """A kernel on the current stream that takes its time before it writes x."""
    get_current_stream().put(lambda: (time.sleep(seconds), np.copyto(x._host, values)))


# ---- The modules ----


def install(monkeypatch, gpus=GPUS):
    """Until the test ends, this is CuPy. Returns the faults of fakenccl."""
    fakenccl.reset()
    fakenccl.streams, fakenccl.current_gpu = streams, lambda: Device().id
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: gpus,
        getDevice=lambda: Device().id,
        deviceGetPCIBusId=lambda gpu: f"0000:{gpu:02X}:00.0",
    )
    own = Device, Stream, Event, get_current_stream
    cuda = types.SimpleNamespace(runtime=runtime, **{f.__name__: f for f in own})
    nccl = types.ModuleType("cupy.cuda.nccl")
    names = ("available", "get_unique_id", "NcclCommunicator", "NcclError")
    for name in (*names, "groupStart", "groupEnd"):
        setattr(nccl, name, getattr(fakenccl, name))
    nccl.__dict__.update(fakenccl.CONSTANTS)
    cupy = types.ModuleType("cupy")
    for name in FUNCTIONS:
        setattr(cupy, name, partial(call, getattr(np, name)))
    cupy.__dict__.update({name: getattr(np, name) for name in CONSTANTS})
    cupy.__dict__.update(ndarray=ndarray, array=array, cuda=cuda)
    cupy.asarray = partial(array, copy=False)
    modules = {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fakenccl.faults
