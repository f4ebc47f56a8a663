"""Text for the language models: Python's own standard library, as found on this disk.

    text.load(None)         source code, about a million characters
    text.load("file.txt")   any text of yours

Nothing is downloaded. Characters are numbered; those outside of ASCII become "?".
"""

import sysconfig
from pathlib import Path

import numpy as np

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
LIMIT = 1_000_000  # characters: enough for a model of this size


def load(path=None, limit=LIMIT):
    """The text as an array of numbers, (length,), int64."""
    if path is not None:
        source = Path(path).read_text(errors="replace")[:limit]
    else:
        source = ""
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            source += file.read_text(errors="replace") + "\n"
            if len(source) >= limit:
                break
    return encode(source[:limit])


def encode(source):
    number = {character: i for i, character in enumerate(CHARACTERS)}
    return np.array([number.get(c, number["?"]) for c in source.expandtabs(4)])


def decode(numbers):
    return "".join(CHARACTERS[i] for i in numbers)


def batch(data, batch_size, context, random):
    """Pieces of the text and the same one character on, both (batch_size, context)."""
    starts = random.integers(0, len(data) - context, batch_size)[:, None]
    inputs = data[starts + np.arange(context)]
    return inputs, data[starts + np.arange(1, context + 1)]
