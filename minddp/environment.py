"""The environment: which rank am I, of how many, and where is rank 0?

A launcher starts n copies of one program and tells each copy its place in environment
variables. Every launcher has its own names for the same numbers:

    launcher               rank                  world size            local rank
    torchrun, minddp run   RANK                  WORLD_SIZE            LOCAL_RANK
    Open MPI               OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  ..._LOCAL_RANK
    MPICH                  PMI_RANK              PMI_SIZE              MPI_LOCALRANKID
    Slurm                  SLURM_PROCID          SLURM_NTASKS          SLURM_LOCALID

Rule 1.  The first launcher of this table that has set a variable has started us. Under
         Slurm, mpiexec leaves the variables of both, and Slurm's then count machines.
Rule 2.  An argument of `init_process_group` wins over a variable.
Rule 3.  Without any of them this is a world of one: the script runs as it stands.

Where rank 0 is: MASTER_ADDR and MASTER_PORT. Without MASTER_ADDR:

    all ranks are on this machine   127.0.0.1
    Slurm                           the first host of the step: node[03-05,9] -> node03
    otherwise                       nobody knows, which is an error

Worked example.  `RANK=1 WORLD_SIZE=2 MASTER_ADDR=[::1] python train.py` gives

    Job(rank=1, world_size=2, local_rank=1, local_world_size=2,
        master_addr="::1", master_port=29500, ...)

    local_rank is 1, for a loopback address proves that all ranks share this machine.

Besides, MINDDP_TOKEN is the secret that the ranks of a job share, MINDDP_JOB_ID the
job's name, MINDDP_TRANSPORT what carries collectives (tcp, shm, nccl, mpi or auto), and
MINDDP_LISTEN_FD the socket that `minddp run` has bound for rank 0. MINDDP_NETLAB slows
the network down, in order to learn from it (netlab.py). MINDDP_HOSTID names the host
that a rank is on, where the kernel's word is not the right one: ranks with the same one
share memory, and one machine can pass for several hosts (hierarchy.py).

In PyTorch: the `env://` rendezvous (torch/distributed/rendezvous.py).

Left out: host files and PMIx. They need a launcher's library; variables need nothing.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from minddp.errors import UsageError

MOST_RANKS = 65_535  # a rank has two bytes on the wire
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
DEFAULT_PORT = 29500  # torchrun's; ranks started by mpiexec or srun must agree on one


@dataclass(frozen=True)
class Launcher:
    """The names of the variables in which one launcher says who a rank is."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


# fmt: off
PLAIN    = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = Launcher("torchrun or minddp run", *PLAIN)
OPEN_MPI = Launcher("Open MPI", *(f"OMPI_COMM_WORLD_{what}" for what in
                                  ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
MPICH    = Launcher("MPICH", "PMI_RANK", "PMI_SIZE",
                             "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM    = Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS",
                             "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
NONE     = Launcher("none", *PLAIN)
# fmt: on

LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, SLURM)  # the order of rule 1


@dataclass(frozen=True)
class Job:
    """One rank's place in its job, and where to find rank 0."""

    rank: int
    world_size: int
    local_rank: int  # this rank's number on its machine: which GPU to take
    local_world_size: int
    master_addr: str
    master_port: int
    token: bytes = field(repr=False)  # a secret: in no log and in no traceback
    job_id: str
    listen_fd: int | None
    launcher: str
    world_ranks: tuple[int, ...] = ()  # of a sub-group: its ranks' numbers in the world
    host_id: str = ""  # ranks with the same share a host; without one, the kernel knows


def from_environment(
    env: Mapping[str, str] = os.environ,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Job:
    """The Job of this process, from the variables of its launcher; arguments win.

    Raises: UsageError naming the variable, its value and what to do.
    """
    launcher = _launcher(env)
    r, n = seat(env, rank, world_size)
    hosts = _slurm_hosts(env) if launcher is SLURM else []
    addr = _address(_given(env, "MASTER_ADDR", "master_addr", master_addr))
    together = n == 1 or len(hosts) == 1 or _is_loopback(addr)
    local_rank, local_size = _local_seat(env, launcher, (r, n) if together else (0, 1))
    return Job(
        rank=r,
        world_size=n,
        local_rank=local_rank,
        local_world_size=local_size,
        master_addr=addr or _default_address(n, local_size, hosts),
        master_port=_port(_given(env, "MASTER_PORT", "master_port", master_port), env),
        token=os.fsencode(env.get("MINDDP_TOKEN", "")),
        job_id=_job_id(env),
        listen_fd=_listen_fd(env) if r == 0 else None,
        launcher=launcher.name,
        host_id=env.get("MINDDP_HOSTID", ""),
    )


def seat(
    env: Mapping[str, str] = os.environ,
    rank: int | None = None,
    world_size: int | None = None,
) -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without a launcher. Arguments win.

    Raises: UsageError naming the variable, its value and what to do.
    """
    launcher = _launcher(env)
    return _seat(
        _given(env, launcher.rank, "rank", rank),
        _given(env, launcher.world_size, "world_size", world_size),
    )


TRANSPORTS = ("tcp", "shm", "auto", "nccl", "mpi")


def chosen_transport(
    env: Mapping[str, str] = os.environ, given: str | None = None
) -> str:
    """What carries collectives, one of TRANSPORTS. The argument wins.

    Raises: UsageError naming the variable, its value and what to do.
    """
    setting = _given(env, "MINDDP_TRANSPORT", "transport", given)
    if setting.value is None:
        return "tcp"
    if setting.value not in TRANSPORTS:
        raise UsageError(
            f"{setting} is unknown. Set {setting.name} to {', '.join(TRANSPORTS)}."
        )
    return str(setting.value)


def usable_cores() -> int:
    """Cores that this process may use; a container or `taskset` may leave only some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def boot_id() -> str:
    """Which machine this is; containers on one machine say the same.

    Its node name where the kernel has no such id.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except OSError:
        return os.uname().nodename


# ---- What was given, and is it a number in its range? ----


@dataclass(frozen=True)
class _Given:
    """A value, and the name under which the user gave it: errors show both."""

    name: str
    value: int | str | None

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    def whole(self, low: int, high: int | None, what: str) -> int:
        """The value as a whole number from low to high."""
        try:
            number = int(str(self.value))
        except ValueError:
            raise UsageError(
                f"{self} is not a whole number. Set {self.name} to {what}."
            ) from None
        if number < low or (high is not None and number > high):
            raise UsageError(f"{self} is out of range. Set {self.name} to {what}.")
        return number


def _given(
    env: Mapping[str, str],
    variable: str,
    argument: str = "",
    value: int | str | None = None,
) -> _Given:
    """The argument if there is one, else the variable."""
    if value is not None:
        return _Given(argument, value)
    return _Given(variable, env.get(variable))


# ---- Who am I? ----


def _launcher(env: Mapping[str, str]) -> Launcher:
    for launcher in LAUNCHERS:
        if launcher.rank in env or launcher.world_size in env:
            return launcher
    return NONE


def _seat(rank: _Given, world_size: _Given) -> tuple[int, int]:
    if rank.value is None and world_size.value is None:
        return 0, 1
    for missing, present in (rank, world_size), (world_size, rank):
        if missing.value is None:
            raise UsageError(
                f"{present} is set, but {missing.name} is not. A rank needs both: set "
                f"{missing.name}, or start the script with `minddp run`."
            )
    n = world_size.whole(1, MOST_RANKS, f"the number of ranks, 1 to {MOST_RANKS}")
    r = rank.whole(0, n - 1, f"this rank's number, 0 to {n - 1} ({world_size})")
    return r, n


def _local_seat(
    env: Mapping[str, str], launcher: Launcher, default: tuple[int, int]
) -> tuple[int, int]:
    """Local rank and local size; where the launcher is silent, the default."""
    rank = _given(env, launcher.local_rank)
    size = _given(env, launcher.local_world_size)
    local_rank, local_size = default
    if rank.value is not None:
        what = "this rank's number on its machine, 0 or more"
        local_rank = rank.whole(0, None, what)
    if size.value is not None:
        what = f"the number of ranks on this machine, more than {rank}"
        local_size = size.whole(local_rank + 1, None, what)
    return local_rank, max(local_size, local_rank + 1)


# ---- Where is rank 0? ----


def bare_address(text: str, name: str) -> str:
    """A host without the brackets that IPv6 addresses have in URLs: "[::1]" -> "::1".

    Raises: UsageError naming `name`, where the text came from, if nothing is left.
    """
    bare = text.strip().removeprefix("[").removesuffix("]")
    if not bare:
        raise UsageError(
            f"{name} is empty. Set it to the address of rank 0's machine, for example "
            "10.0.0.1, or leave it out if all ranks are on this machine."
        )
    return bare


def _address(given: _Given) -> str:
    """The address as it was given, "" if it was not."""
    return "" if given.value is None else bare_address(str(given.value), given.name)


def _is_loopback(addr: str) -> bool:
    return addr in ("localhost", "::1") or addr.startswith("127.")


def _default_address(n: int, local_size: int, hosts: list[str]) -> str:
    if local_size >= n:
        return "127.0.0.1"
    if hosts:
        return hosts[0]
    raise UsageError(
        f"MASTER_ADDR is not set, and only {local_size} of {n} ranks are known to run "
        "here. Set it on every rank to the address of rank 0's machine; if all "
        "are on this machine, to 127.0.0.1."
    )


def _port(given: _Given, env: Mapping[str, str]) -> int:
    if given.value is None:
        return DEFAULT_PORT
    port = given.whole(1, 65535, "a free port of rank 0's machine, 1 to 65535")
    # torchrun's agent serves a store of its own on MASTER_PORT. Nobody else can bind
    # that port, so our ranks meet at the next one.
    if (
        given.name == "MASTER_PORT"
        and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        return port + 1 if port < 65535 else port - 1
    return port


def _slurm_hosts(env: Mapping[str, str]) -> list[str]:
    """Machines of this step, rank 0's first.

    The launch node comes last: with `salloc` it is the login node, where no rank runs.
    """
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        return list(expand_hosts(nodes))
    launch_node = env.get("SLURM_LAUNCH_NODE_IPADDR")
    return [launch_node] if launch_node else []


def expand_hosts(nodes: str) -> Iterator[str]:
    """node03, node04, node9, gpu: the hosts in Slurm's "node[03-04,9],gpu"."""
    for item in re.findall(r"(?:[^,\[]|\[[^]]*])+", nodes):
        head, bracket, tail = item.partition("[")
        ranges, _, tail = tail.partition("]")
        if not bracket:
            yield head
            continue
        for number in _numbers(ranges):
            for end in expand_hosts(tail) if tail else [""]:
                yield head + number + end


def _numbers(ranges: str) -> Iterator[str]:
    """03, 04, 9: the numbers in "03-04,9", as wide as they were written."""
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not dash:
            yield first
        elif first.isdecimal() and last.isdecimal():
            for number in range(int(first), int(last) + 1):
                yield f"{number:0{len(first)}d}"
        else:
            raise UsageError(
                f"Slurm's list of nodes has {part!r}, which is no range. Set "
                "MASTER_ADDR to the address of rank 0's machine instead."
            )


# ---- What `minddp run` hands over ----


def _job_id(env: Mapping[str, str]) -> str:
    names = ("MINDDP_JOB_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
    return next((env[name] for name in names if env.get(name)), "")


def _listen_fd(env: Mapping[str, str]) -> int | None:
    given = _given(env, "MINDDP_LISTEN_FD")
    if given.value is None:
        return None
    return given.whole(0, None, "an open descriptor, or unset it; `minddp run` sets it")
