"""Running the commands that the documentation shows, as a reader would type them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 120


def run(command, cwd=ROOT):
    """The finished process of a command, with `python` and `minddp` those of this
    environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
