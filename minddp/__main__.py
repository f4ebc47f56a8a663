"""The command line: `minddp run` and `minddp bench`; also `python -m minddp run`.

Rule.  A mistake in the call is one message on stderr and exit code 2; an interrupt is
       exit code 130. A traceback is for mistakes of ours.

A command is imported when it is called: starting ranks need not wait for what trains.
"""

import os
import sys
from collections.abc import Sequence

from minddp.errors import MindDPError, UsageError

HELP = """\
minddp: distributed data-parallel training, small enough to read

  minddp run -n 2 train.py ...    run a script as the ranks of one job
  minddp bench all-reduce ...     time an all-reduce; so for the other collectives
  minddp bench step ...           time whole training steps
  minddp bench rendezvous ...     time how n ranks start

  minddp COMMAND --help           the options of a command
  minddp --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of a command; argv: what follows `minddp` (default: sys.argv)."""
    _open_standard_streams()
    try:
        return _command(list(sys.argv[1:] if argv is None else argv))
    except MindDPError as exc:
        print(f"minddp: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, UsageError) else 1
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """If 0, 1 or 2 is closed (`<&-`), our next pipe or socket would get its number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _command(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command == "run":
        from minddp import launch

        return launch.main(rest)
    if command == "bench":
        from minddp import bench

        return bench.main(rest)
    if command == "--version":
        from importlib.metadata import version

        print(f"minddp {version('minddp')}")
        return 0
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    raise UsageError(f"there is no command {command!r}; `minddp --help` lists them.")


if __name__ == "__main__":
    sys.exit(main())
