"""Write ops.npz: what PyTorch makes of the calls in ops.py.

    pip install torch==2.13.0 numpy
    python tests/golden/make_ops.py

Run by hand, once for a PyTorch version or whenever ops.py changes. The tests need the
file, not PyTorch. All is float64; a second run writes the same bytes.

    CASE.output           what the call returns
    CASE.gradients        of all floating inputs and parameters, in one axis
    CASE.state            modules: "name shape" of each parameter and buffer
    CASE.buffers          modules: their values after the call, in one axis
    torch                 the version of PyTorch
"""

from pathlib import Path

import numpy as np
import torch
from ops import CASES, MODULES, Library, module_results_of, results_of

FILE = Path(__file__).parent / "ops.npz"


class Functions:
    """torch.nn.functional, and behind it torch."""

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name, None) or getattr(torch, name)


PYTORCH = Library(
    F=Functions(),
    nn=torch.nn,
    dtype=torch.float64,
    tensor=torch.tensor,
    array=lambda t: t.detach().numpy(),
)


def main():
    torch.set_num_threads(1)
    results = {"torch": np.array(torch.__version__)}
    for cases, run in ((CASES, results_of), (MODULES, module_results_of)):
        for name, case in cases.items():
            for kind, values in run(PYTORCH, case).items():
                results[f"{name}.{kind}"] = values
    np.savez_compressed(FILE, **results)
    count = len(CASES) + len(MODULES)
    print(f"{FILE.name}: {count} cases, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
