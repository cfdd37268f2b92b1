"""A 1.1 billion parameter Llama (13 GB of weights and states) trained within 4 GiB of host memory, and exported in 1.

Trains a few steps of 1 x 256 tokens with an evaluation between, and writes the final model; then verifies the saved
point and exports it in float32 (4.4 GB, one shard); each in a fresh process, under a hard cgroup limit where cgroups
can be written (as root, v1). Takes about 60 GB of disk.

    python benchmarks/memory.py [--limit 4GiB] [--export-limit 1GiB] [--steps 3] [--dtype float32] [--directory DIR]
                                [--json FILE] [--check]
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ending import exit_code, parser_of, write_json

from spillway.spec.sizes import format_seconds, format_size, parse_size

CGROUP = Path("/sys/fs/cgroup/memory")
DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


@dataclass(frozen=True)
class Process:
    """What one command took: bytes and seconds."""

    name: str
    exit_code: int
    limit_bytes: int
    hard_limit: bool
    peak_process_bytes: int  # resident, with the libraries' files that are mapped
    peak_cgroup_bytes: int  # with page cache the kernel could have dropped; 0 without a cgroup
    seconds: float
    summary: dict[str, Any] = field(default_factory=dict)  # what the command prints of itself


def make_cgroup(limit_bytes: int) -> Path | None:
    """A group with a hard limit, or None where there is none to be had."""
    group = CGROUP / f"spillway-memory-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        return None
    return group


def run(name: str, arguments: list[str], limit_bytes: int) -> Process:
    """One of our commands in a child process under the limit."""
    group = make_cgroup(limit_bytes)

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-m", "spillway", *arguments, "--json"]
    start = os.times().elapsed
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    printed = child.stdout.read() if child.stdout is not None else ""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    peak_group = 0
    if group is not None:
        peak_group = int((group / "memory.max_usage_in_bytes").read_text())
        group.rmdir()
    summary = json.loads(printed) if child.returncode == 0 else {}
    seconds = os.times().elapsed - start
    peak = 1024 * usage.ru_maxrss
    return Process(name, child.returncode, limit_bytes, group is not None, peak, peak_group, seconds, summary)


def train(directory: Path, out: Path, limit_bytes: int, steps: int, dtype: str) -> Process:
    """Load, train, evaluate, write the model."""
    arguments = ["train", str(directory / "llama-1.1b"), str(directory / "text"), "-o", str(out)]
    arguments += ["--host-memory", str(limit_bytes), "--max-length", "256", "--per-device-train-batch-size", "1"]
    arguments += ["--max-steps", str(steps), "--device", "cpu", "--dtype", dtype]
    held_out = str(directory / "text" / "000.txt")
    return run("train", [*arguments, "--eval-data", held_out, "--eval-steps", "2"], limit_bytes)


def main() -> int:
    """Run, print, and with --check fail where a target is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--limit", type=parse_size, default=parse_size("4GiB"))
    parser.add_argument("--export-limit", type=parse_size, default=parse_size("1GiB"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="float32 on processors without AVX-512 is far faster")
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        directory, out = Path(temporary), Path(temporary) / "run"
        subprocess.run([sys.executable, str(DEMO), str(directory), "--shape", "1.1b"], check=True)
        processes = [train(directory, out, options.limit, options.steps, options.dtype)]
        if processes[0].exit_code == 0:
            exported = ["export", str(out), str(directory / "exported"), "--dtype", "float32"]
            processes.append(run("verify", ["verify", str(out)], options.export_limit))
            processes.append(run("export", exported, options.export_limit))
    for process in processes:
        enforced = "hard cgroup limit" if process.hard_limit else "not enforced"
        print(
            f"{process.name:7} limit {format_size(process.limit_bytes)} ({enforced}): process peak "
            f"{format_size(process.peak_process_bytes)}, cgroup peak {format_size(process.peak_cgroup_bytes)} (with "
            f"droppable page cache), {format_seconds(process.seconds)}"
        )
    trained = processes[0].summary
    print(
        f"model state {format_size(trained.get('state_bytes', 0))}, written "
        f"{format_size(sum(trained.get('written_bytes', {}).values()))}, a step "
        f"{format_seconds(trained.get('measured_step_s', 0.0))}"
    )
    write_json(options.json, processes)
    return exit_code(options.check, [line for process in processes for line in missed(process)])


def missed(process: Process) -> list[str]:
    """What one process did not keep to."""
    lines = []
    if not process.hard_limit:
        lines.append(f"{process.name}: no cgroup v1 to limit memory with (it takes root): the limit was not enforced")
    if process.exit_code != 0:
        lines.append(f"{process.name} ended with exit code {process.exit_code}")
    elif process.peak_process_bytes > process.limit_bytes:
        lines.append(f"{process.name} took {format_size(process.peak_process_bytes)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
