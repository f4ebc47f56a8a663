"""Write curves.npz: how PyTorch trains the models of curves.py.

    pip install torch==2.13.0 numpy
    python tests/golden/make_curves.py

Run by hand, once for a PyTorch version or whenever curves.py changes. The tests need
the file, not PyTorch. All is float64; a second run writes the same bytes.

    CASE.losses           the loss of every step
    CASE.weights          weights after training, all in one array
    torch                 the version of PyTorch
"""

from pathlib import Path

import numpy as np
import torch
from curves import CASES, Library, train
from ops import numbers

FILE = Path(__file__).parent / "curves.npz"
PYTORCH = Library(
    F=torch.nn.functional,
    nn=torch.nn,
    optim=torch.optim,
    float64=torch.float64,
    tensor=torch.from_numpy,
    array=lambda p: p.detach().numpy(),
    numbers=numbers,
)


def main():
    torch.set_num_threads(1)
    results = {"torch": np.array(torch.__version__)}
    for case in CASES:
        losses, weights = train(PYTORCH, case)
        results[f"{case}.losses"], results[f"{case}.weights"] = losses, weights
        print(f"{case}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    np.savez_compressed(FILE, **results)
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
