"""Two processes find each other and add an array.

    minddp run -n 2 examples/02_two_ranks_say_hello.py

prints (the ranks in any order):

    [rank 0] rank 0 of 2: I put in [1. 2. 3.], together we have [11. 22. 33.]
    [rank 1] rank 1 of 2: I put in [10. 20. 30.], together we have [11. 22. 33.]
    [rank 0] it took 68 bytes each way: 44 of header and 24 of array
"""

import numpy as np

import minddp

with minddp.init_process_group() as pg:
    mine = np.array([1.0, 2.0, 3.0]) * 10**pg.rank

    total = mine.copy()
    pg.all_reduce(total)  # in place: every rank's array becomes the sum

    who = f"rank {pg.rank} of {pg.world_size}"
    print(f"{who}: I put in {mine}, together we have {total}")

    if pg.rank == 0:
        stats = pg.stats()
        header = stats["header_bytes"]
        array = stats["bytes_sent"] - header
        print(
            f"it took {header + array} bytes each way: {header} of header and "
            f"{array} of array"
        )
