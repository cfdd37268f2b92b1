"""A 1.1 billion parameter Llama (13 GB of state) trained within 4 GiB of host memory.

Loads, trains a few steps of 1 x 256 tokens, writes the final model; all in a fresh process, under a hard cgroup limit
where cgroups can be written (as root, v1). Prints the peak of every phase.

    python benchmarks/memory.py [--limit 4GiB] [--steps 3] [--directory DIR] [--json FILE] [--check]
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ending import exit_code, parser_of, write_json

from spillway.spec.sizes import format_seconds, format_size, parse_size

CGROUP = Path("/sys/fs/cgroup/memory")
DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


@dataclass(frozen=True)
class Result:
    """Bytes and seconds of one run."""

    exit_code: int
    limit_bytes: int
    hard_limit: bool
    peak_process_bytes: int  # anonymous memory of the process, sampled
    peak_cgroup_bytes: int  # with page cache the kernel could have dropped; 0 without a cgroup
    state_bytes: int
    step_seconds: float
    written_bytes: float


def make_cgroup(limit_bytes: int) -> Path | None:
    """A group with a hard limit, or None where there is none to be had."""
    group = CGROUP / f"spillway-memory-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        return None
    return group


def run(directory: Path, limit_bytes: int, steps: int) -> Result:
    """Train in a child process under the limit."""
    out = Path(tempfile.mkdtemp(prefix="run-", dir=directory)) / "run"
    group = make_cgroup(limit_bytes)
    command = [sys.executable, "-m", "spillway", "train", str(directory / "llama-1.1b")]
    command += [str(directory / "text"), "-o", str(out), "--host-memory", str(limit_bytes), "--max-length", "256"]
    command += ["--per-device-train-batch-size", "1", "--max-steps", str(steps), "--device", "cpu", "--json"]

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter, check=False)
    peak_group = 0
    if group is not None:
        peak_group = int((group / "memory.max_usage_in_bytes").read_text())
        group.rmdir()
    summary = json.loads(child.stdout) if child.returncode == 0 else {}
    return Result(
        child.returncode,
        limit_bytes,
        group is not None,
        summary.get("measured_peaks", {}).get("host", 0),
        peak_group,
        summary.get("state_bytes", 0),
        summary.get("measured_step_s", 0.0),
        sum(summary.get("written_bytes", {}).values()),
    )


def main() -> int:
    """Run, print, and with --check fail where a target is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--limit", type=parse_size, default=parse_size("4GiB"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        directory = Path(temporary)
        subprocess.run([sys.executable, str(DEMO), str(directory), "--shape", "1.1b"], check=True)
        result = run(directory, options.limit, options.steps)
    enforced = "hard cgroup limit" if result.hard_limit else "not enforced"
    print(f"limit           {format_size(result.limit_bytes)} ({enforced})")
    print(f"process peak    {format_size(result.peak_process_bytes)}")
    print(f"cgroup peak     {format_size(result.peak_cgroup_bytes)} (with droppable page cache)")
    print(f"model state     {format_size(result.state_bytes)}")
    print(f"step            {format_seconds(result.step_seconds)}")
    print(f"written         {format_size(result.written_bytes)}")
    write_json(options.json, result)
    missed = []
    if not result.hard_limit:
        missed.append("no cgroup v1 to limit memory with (it takes root): the budget was not enforced")
    if result.exit_code != 0:
        missed.append(f"the run ended with exit code {result.exit_code}")
    elif result.peak_process_bytes > result.limit_bytes:
        missed.append(f"the process took {format_size(result.peak_process_bytes)}")
    return exit_code(options.check, missed)


if __name__ == "__main__":
    sys.exit(main())
