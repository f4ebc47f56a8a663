"""`minddp run`: start n copies of a script, each with its own rank in its environment.

    minddp run -n 2 train.py --lr 0.1

    launcher --- listen(127.0.0.1, any free port) ----.
       |                                              |  handed on, already bound
       |--- RANK=0 WORLD_SIZE=2 ... train.py --lr 0.1 <
       '--- RANK=1 WORLD_SIZE=2 ... train.py --lr 0.1 ---> dials MASTER_ADDR:MASTER_PORT

This file decides what to start; supervise.py starts it and moves bytes and signals;
relay.py decides what is shown.

Rule 1.  What a rank must know is in its environment, where environment.py finds it, and
         nothing is in its arguments: every user of the machine can read those in `ps`,
         and the token is a secret.
Rule 2.  On one machine nobody chooses a port. A number that was free a moment ago may
         be taken when rank 0 binds it; so the launcher binds, and passes the socket on.
Rule 3.  Each rank gets its share of the cores. NumPy would start one thread per core in
         every rank, and n ranks on c cores would fight with n * c threads.

Worked example.  `minddp run --nnodes 2 --node-rank 1 -n 4` starts ranks 4, 5, 6 and 7
of 8; their LOCAL_RANKs are 0, 1, 2 and 3.

Exit code: that of the rank that failed first, or 128 + the signal that killed it; 130,
143 or 129 after SIGINT, SIGTERM or SIGHUP to the launcher; 2 for a mistake in the call.

In PyTorch: torchrun (torch/distributed/run.py and its elastic agent), whose flags work
here too.

Left out: elasticity (the number of ranks never changes), rendezvous back ends
(--rdzv-*), starting on other machines (call `minddp run` there, by ssh or by Slurm),
and programs that are not Python.
"""

import argparse
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minddp.environment import (
    DEFAULT_PORT,
    THREAD_VARIABLES,
    bare_address,
    usable_cores,
)
from minddp.errors import UsageError
from minddp.net import listen
from minddp.relay import ERR
from minddp.supervise import Outcome, supervise

LOOPBACK = "127.0.0.1"

FLAGS = (
    ("--nproc-per-node", int, 1, "ranks on this machine (default 1)"),
    ("--nnodes", int, 1, "machines in the job (default 1)"),
    ("--node-rank", int, None, "this machine's number, 0 to nnodes - 1"),
    ("--master-addr", str, LOOPBACK, f"rank 0's machine (default {LOOPBACK})"),
    ("--master-port", int, None, "its port (default: any; if nnodes > 1: 29500)"),
    ("--max-restarts", int, 0, "times to start all ranks again after a failure"),
)

# Meant for the rank of an outer launcher, if `minddp run` is called by one.
NOT_INHERITED = ("MINDDP_LISTEN_FD", "MINDDP_PROGRESS", "TORCHELASTIC_USE_AGENT_STORE")


@dataclass(frozen=True)
class Layout:
    """`nproc` ranks on each of `nnodes` machines; this one is number `node_rank`."""

    nproc: int
    nnodes: int = 1
    node_rank: int = 0

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def ranks(self) -> range:
        """The ranks on this machine."""
        return range(self.node_rank * self.nproc, (self.node_rank + 1) * self.nproc)


def launch(
    program: Sequence[str],
    nproc: int,
    *,
    nnodes: int = 1,
    node_rank: int | None = None,
    master_addr: str = LOOPBACK,
    master_port: int | None = None,
    max_restarts: int = 0,
) -> int:
    """The exit code of a job that runs `program` as nproc ranks on this machine.

    program: what follows `python`, as in ["train.py", "--lr", "0.1"].

    Raises: UsageError before anything is started.
    """
    layout = Layout(nproc, nnodes, node_rank or 0)
    addr = bare_address(master_addr, "--master-addr")
    _check(layout, node_rank, master_port, max_restarts)
    sys.stdout.flush()  # what we printed before belongs before what the ranks print
    for left in range(max_restarts, -1, -1):
        outcome = _run_once([sys.executable, *program], layout, addr, master_port)
        # Exit code 2 means "called in a wrong way", and it would be called so again.
        if outcome.interrupted or outcome.exit_code in (0, 2) or left == 0:
            break
        note = f"restarting all ranks; {left - 1} more restarts are left."
        print(f"minddp run: {note}", file=sys.stderr, flush=True)
    return outcome.exit_code


def _run_once(
    program: Sequence[str], layout: Layout, addr: str, port: int | None
) -> Outcome:
    common = common_environment(os.environ, layout, usable_cores())
    common["MASTER_ADDR"] = addr
    rank_0 = {"MINDDP_PROGRESS": "1"} if os.isatty(ERR) else {}
    if layout.nnodes > 1:  # rank 0 may be elsewhere: it binds the port itself
        common["MASTER_PORT"] = str(port or DEFAULT_PORT)
        environments = rank_environments(common, layout, rank_0)
        return supervise(program, environments, layout.ranks.start)
    listener = listen(addr, port or 0)
    common["MASTER_PORT"] = str(listener.port)
    common["MINDDP_TOKEN"] = secrets.token_hex(32)
    common["MINDDP_JOB_ID"] = secrets.token_hex(8)
    rank_0["MINDDP_LISTEN_FD"] = str(listener.fileno())
    environments = rank_environments(common, layout, rank_0)
    return supervise(program, environments, listener=listener)


# ---- What each rank is told ----


def common_environment(
    env: Mapping[str, str], layout: Layout, cores: int
) -> dict[str, str]:
    """The launcher's own environment, and what all ranks of this machine are told."""
    common = {name: value for name, value in env.items() if name not in NOT_INHERITED}
    common["WORLD_SIZE"] = str(layout.world_size)
    common["LOCAL_WORLD_SIZE"] = str(layout.nproc)
    common["PYTHONUNBUFFERED"] = "1"  # what a killed rank has printed is not lost
    for name in THREAD_VARIABLES:
        common.setdefault(name, str(max(1, cores // layout.nproc)))
    return common


def rank_environments(
    common: Mapping[str, str], layout: Layout, rank_0: Mapping[str, str]
) -> list[dict[str, str]]:
    """One environment for each rank of this machine, in the order of their numbers.

    rank_0: what only rank 0 is told, if it is one of them.
    """
    return [
        {
            **common,
            **(rank_0 if rank == 0 else {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
        }
        for local_rank, rank in enumerate(layout.ranks)
    ]


def _check(
    layout: Layout, node_rank: int | None, port: int | None, max_restarts: int
) -> None:
    """Raise a UsageError for numbers with which no job can run."""
    if layout.nproc < 1:
        raise UsageError(f"--nproc-per-node {layout.nproc}: at least 1 rank must run.")
    if layout.nnodes < 1:
        raise UsageError(f"--nnodes {layout.nnodes}: this machine is 1 already.")
    if max_restarts < 0:
        raise UsageError(f"--max-restarts {max_restarts}: it must be 0 or more.")
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"--master-port {port}: ports go from 1 to 65535.")
    if layout.nnodes > 1:
        _check_nodes(layout, node_rank, port)


def _check_nodes(layout: Layout, node_rank: int | None, port: int | None) -> None:
    last = layout.nnodes - 1
    if node_rank is None or not 0 <= node_rank <= last:
        given = "is missing" if node_rank is None else f"{node_rank} is out of range"
        raise UsageError(
            f"--node-rank {given}: with --nnodes {layout.nnodes} each machine needs a "
            f"number of its own, 0 to {last}; rank 0 runs on machine 0."
        )
    if port == 0:
        raise UsageError(
            '--master-port 0: several machines cannot agree on "any free port". '
            f"Choose one, or leave it out for {DEFAULT_PORT}."
        )
    if not os.environ.get("MINDDP_TOKEN"):
        raise UsageError(
            "MINDDP_TOKEN is not set. With several machines all need the same secret, "
            "to tell the job's ranks from strangers. Make one, once:\n"
            '    python -c "import secrets; print(secrets.token_hex(32))"\n'
            "and set it on every machine before this command:\n"
            "    export MINDDP_TOKEN=<what was printed>"
        )


# ---- The command line ----


def main(argv: Sequence[str]) -> int:
    """`minddp run`: the exit code of the job that these arguments describe."""
    args = _parser().parse_args(argv)
    if args.standalone and args.nnodes > 1:
        raise UsageError(
            f"--standalone means one machine, but --nnodes is {args.nnodes}."
        )
    if not args.module and not os.path.exists(args.script):
        raise UsageError(
            f"there is no script {args.script!r} here. Flags of the script go after "
            "its name, those of `minddp run` before it."
        )
    module = ["-m"] if args.module else []
    return launch(
        [*module, args.script, *args.args],
        args.nproc_per_node,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        max_restarts=args.max_restarts,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minddp run",
        usage="minddp run [options] [-m] script.py [arguments of the script]",
        description="Run n copies of a script as the ranks of one job.",
        epilog="torchrun's spellings with underscores work as well.",
        allow_abbrev=False,
    )
    for flag, kind, default, text in FLAGS:
        names = ("-n", flag) if flag == "--nproc-per-node" else (flag,)
        metavar = "N" if kind is int else "HOST"
        parser.add_argument(
            *names, type=kind, default=default, metavar=metavar, help=text
        )
        torchrun = "--" + flag[2:].replace("-", "_")
        if torchrun != flag:
            parser.add_argument(
                torchrun, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
    parser.add_argument(
        "--standalone", action="store_true", help="one machine, any free port (default)"
    )
    parser.add_argument(
        *("-m", "--module"), action="store_true", help="script is a module's name"
    )
    parser.add_argument("script", help="the program that every rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser
