"""Trainings in child processes that are killed without warning, at random instants or at a chosen system call."""

import functools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

# Imported once by a server that children are forked from: a child starts in milliseconds.
_PRELOADED = [
    "spillway.cli.main",
    "spillway.training.run",
    "spillway.integrations.huggingface",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
    "peft",
]
_forks = multiprocessing.get_context("forkserver")


@functools.cache
def _start_server() -> tempfile.TemporaryDirectory[str]:
    """The server takes its import path from the environment alone, and the layer that makes transfers fail: it lies in
    the directory, which must not go before the server does."""
    directory = tempfile.TemporaryDirectory()
    layer, source = Path(directory.name) / "faults.so", Path(__file__).parent / "faults.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", layer, source, "-ldl"], check=True)
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(layer)}
    _forks.set_forkserver_preload(_PRELOADED)
    try:
        forkserver.ensure_running()
    finally:
        for name in ("PYTHONPATH", "LD_PRELOAD"):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
    return directory


class Armed(Protocol):
    """Changes the child that it is started with."""

    def arm(self) -> None:
        """In the child."""


def start(
    command: Sequence[str], armed: Armed | None = None, errors: Path | None = None, output: Path | None = None
) -> BaseProcess:
    """Run a spillway command in a child. `errors`, `output`: files for what it prints on stderr and stdout."""
    _start_server()
    child = _forks.Process(target=_child, args=(list(command), armed, errors, output))
    child.start()
    return child


def finish(child: BaseProcess, seconds: float = 120) -> int:
    """The exit code of a child that ends by itself."""
    child.join(seconds)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError("the child hangs")
    return child.exitcode


def kill_after(child: BaseProcess, seconds: float) -> bool:
    """SIGKILL after that long; False where the child had ended before."""
    child.join(seconds)
    if child.exitcode is not None:
        return False
    child.kill()
    child.join()
    return child.exitcode == -signal.SIGKILL


class Deadly:
    """The process kills itself around the n-th call of a function of `os`; of those on files of a name alone, where
    one is given."""

    def __init__(self, name: str, call: int, before: bool, file: str = "") -> None:
        self.name, self.call, self.before, self.file = name, call, before, file

    def arm(self) -> None:
        """In the child."""
        original: Callable[..., Any] = getattr(os, self.name)
        calls = 0

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if self.file not in str(args):
                return original(*args, **kwargs)
            calls += 1
            if calls == self.call and self.before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if calls == self.call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, self.name, deadly)


class Failing:
    """Transfers of store files fail, as faults.c says, by io_uring where the kernel allows it or through the thread
    pool."""

    def __init__(self, fault: str, uring: bool = False) -> None:
        self.fault, self.uring = fault, uring

    def arm(self) -> None:
        """In the child."""
        from spillway.native import DiskEngine

        if not self.uring:
            init = DiskEngine.__init__
            DiskEngine.__init__ = lambda self, depth=32, block=1 << 20, uring=False: init(self, depth, block, False)  # type: ignore[method-assign,misc]
        os.environ["SPILLWAY_FAULT"] = self.fault


class Counting:
    """Counts the calls of functions of `os` into a file, which is read when the process is over."""

    def __init__(self, names: Sequence[str], file: Path) -> None:
        self.names, self.file = names, file

    def arm(self) -> None:
        """In the child."""
        for name in self.names:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with open(self.file, "a") as file:
                file.write(f"{name}\n")
            return original(*args, **kwargs)

        return counted

    def counts(self) -> dict[str, int]:
        """How often each was called."""
        called = self.file.read_text().split()
        return {name: called.count(name) for name in self.names}


def _child(command: list[str], armed: Armed | None, errors: Path | None, output: Path | None) -> None:
    from spillway.cli.main import run
    from spillway.hardware import timing
    from spillway.training import telling

    telling._TELLING_SECONDS = (
        math.inf
    )  # whether rates are kept for the next run would depend on how busy the machine is
    torch.set_num_threads(2)
    timing.ALONE_SECONDS = timing.TOGETHER_SECONDS = 0.02  # what a run is killed in is its training
    for stream, file in ((1, output or os.devnull), (2, errors or os.devnull)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    if armed is not None:
        armed.arm()
    sys.exit(run(command))


def outcome(run: Path) -> tuple[list[tuple[int, float]], dict[str, torch.Tensor]]:
    """Step and loss of every step, and the final weights."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows], load_file(run / "model" / "model.safetensors")


def same(ours: tuple[Any, dict[str, torch.Tensor]], theirs: tuple[Any, dict[str, torch.Tensor]]) -> bool:
    """Bit for bit."""
    if ours[0] != theirs[0] or ours[1].keys() != theirs[1].keys():
        return False
    return all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])


def survive(
    command: Callable[[Path], list[str]],
    directory: Path,
    kills: int,
    seed: int,
    longest: float,
    check: Callable[[Path], None] = lambda run: None,
) -> Iterator[tuple[int, Path]]:
    """Train again and again, each time killed at a random instant and resumed until it ends by itself, until `kills`
    have hit. Yields the number of kills so far and the run directory whenever a training has come to its end. `check`
    looks at the directory after every kill."""
    random_instant = random.Random(seed)
    hit = rounds = 0
    while hit < kills:
        run = directory / f"run-{rounds}"
        rounds += 1
        while kill_after(start(command(run)), random_instant.uniform(0, longest)):
            hit += 1
            check(run)
        yield hit, run
        shutil.rmtree(run)


def measure(command: list[str]) -> float:
    """Seconds an uninterrupted run takes, the start of the server not counted."""
    finish(start(["--version"]))
    begin = time.perf_counter()
    code = finish(start(command))
    if code != 0:
        raise RuntimeError(f"the uninterrupted run ended with {code}")
    return time.perf_counter() - begin
