"""Workers: fresh processes that train some steps and print a line of JSON for each."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

HERE = Path(__file__).parent / "peer_workers"


def measure(command: list[str], enter: Callable[[], None] | None, timeout: int = 900) -> list[dict[str, float]] | str:
    """The rows that a worker printed, or why it failed. `enter` is called in the child first; `timeout` in seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(psutil.cpu_count(logical=True)), "PYTHONPATH": str(HERE)}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, preexec_fn=enter, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"took more than {timeout // 60} minutes"
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    if done.returncode != 0 or not rows:
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    return rows
