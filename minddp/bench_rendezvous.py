"""`minddp bench rendezvous`: what it costs n processes to become a group.

    command          last rank has imported          last rank has its group
       |----------- import -----------|------ meet ------|
       start n interpreters,           join, table, ring
       NumPy, minddp

All ranks read the same clock, the machine's, so moments on different ranks can be
compared. A rank that has imported early waits for the others in its rendezvous; this is
counted as import, since it is that which it waits for.

On a machine with fewer cores than ranks, imports take turns, and are nearly all of it.

Cost at rank 0: the control star has n-1 links, and every rank joins with one message
and gets one, the table of n addresses. That is O(n) messages, and O(n) bytes for each
rank, about 25 n. `control_bytes` is what rank 0 has sent; a heartbeat or two are in it,
and more if the start takes longer than two seconds.

In PyTorch: `init_process_group` with `TCPStore`; gloo then connects every pair.

Left out: several machines.
"""

import math
import re
from pathlib import Path

import numpy as np

from minddp.bench_clock import Row, network, peak_mb
from minddp.group import ProcessGroup

STATUS = Path("/proc/self/status")


def resident_mb() -> float:
    """What of this process is in memory now, in MB; nan where the kernel does not
    tell."""
    status = STATUS.read_text() if STATUS.exists() else ""
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.M)
    return int(found[1]) * 1024 / 1e6 if found else math.nan


def rendezvous_row(
    pg: ProcessGroup, started: float, imported: float, met: float
) -> Row:
    """The row of this start. All ranks call it, right after they have met.

    started: when the command began, on all ranks the same. imported, met: when this
    rank had imported, and had its group. Seconds of time.monotonic.
    """
    memory = resident_mb(), peak_mb()
    pg.barrier()  # rank 0 has sent all of the table
    sent = pg.stats()["control_bytes_sent"]
    table = pg.all_gather_rows(np.array([imported, met, sent, *memory]))
    last_import, last_met, _, resident, peak = table.max(0).tolist()
    peak = np.nanmax([resident, peak])  # the kernel's count lags by some pages
    bytes_of_0, *of_others = table[:, 2].astype(int).tolist()
    return {
        "world_size": pg.world_size,
        **network(pg),
        "import_s": round(last_import - started, 3),
        "meet_s": round(last_met - last_import, 3),
        "total_s": round(last_met - started, 3),
        "resident_mb": None if math.isnan(resident) else round(resident, 1),
        "peak_mb": round(peak, 1),
        "control_bytes": bytes_of_0,
        "control_bytes_a_rank": round(bytes_of_0 / max(1, len(of_others))),
    }
