"""Rank 1 knocks with a token that is not the job's.

minddp run -n 2 examples/broken/wrong_token.py
"""

import os

import minddp

if os.environ["RANK"] == "1":
    os.environ["MINDDP_TOKEN"] = "a guess"

with minddp.init_process_group() as pg:
    print(f"rank {pg.rank} is in")
