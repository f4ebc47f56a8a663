"""Progress bars: tqdm, where it is installed and somebody watches; nothing elsewhere.

    for x, y in progress(loader, desc="epoch 1", show=pg.rank == 0):
        ...

Rule.  A bar is for eyes, so it is drawn only on a terminal. A rank of `minddp run`
       writes into a pipe; the launcher knows whether a terminal is at its other end,
       tells rank 0 by MINDDP_PROGRESS, and draws the bar below all lines (relay.py).

Left out: bars for several ranks at once. Replicas keep step, so one bar tells all.
"""

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

COLUMNS = 70  # through a pipe tqdm cannot see the width; 80 less the tag "[rank 0] "


def progress(
    iterable: Iterable[Any], desc: str = "", show: bool = True
) -> Iterable[Any]:
    """The same items; while they are taken, a bar on stderr if somebody watches it."""
    piped = not sys.stderr.isatty()
    if not show or (piped and not os.environ.get("MINDDP_PROGRESS")):
        return iterable
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:  # it comes with the extra: pip install 'minddp[viz]'
        return iterable
    ncols = COLUMNS if piped else None
    bar: Iterable[Any] = tqdm(
        iterable, desc=desc, file=sys.stderr, ncols=ncols, leave=False
    )
    return bar
