"""What a run was trained on, remembered in its directory so that a changed file can be told from the one before."""

import json
from pathlib import Path

from spillway.data import Encoded
from spillway.durable import write_whole

SAMPLES = "samples.json"


def remember_samples(directory: Path, data: Encoded) -> None:
    """A checksum of each sample."""
    write_whole(directory / SAMPLES, json.dumps({"samples": data.checksums()}, separators=(",", ":")))


def what_differs(directory: Path, data: Encoded) -> str:
    """The difference between the samples now and those that were remembered; nothing where none were."""
    try:
        before = list(json.loads((directory / SAMPLES).read_text())["samples"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    now = data.checksums()
    if now == before:  # remembered of a start that came after the saved point
        return ""
    pairs = enumerate(zip(before, now, strict=False))
    first = next((index for index, (old, new) in pairs if old != new), min(len(before), len(now)))
    counts = f"{len(now)} samples, before {len(before)}" if len(now) != len(before) else f"{len(now)} samples"
    if first < len(now):
        return f"sample {first + 1}, of {data.samples[first].where}, is the first that differs ({counts})"
    return f"samples are missing at the end ({counts})"
