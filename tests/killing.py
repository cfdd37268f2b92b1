"""Trainings in child processes that are killed without warning, at random instants or at a chosen system call."""

import functools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# Imported once by a server that children are forked from: a child starts in milliseconds.
_PRELOADED = [
    "spillway.cli.main",
    "spillway.training",
    "spillway.integrations.huggingface",
    "transformers.models.llama.modeling_llama",
]
_forks = multiprocessing.get_context("forkserver")


@functools.cache
def _start_server() -> None:
    """The server takes its import path from the environment alone."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    _forks.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def start(command: Sequence[str], deadly: "Deadly | Counting | None" = None) -> BaseProcess:
    """Run a spillway command in a child."""
    _start_server()
    child = _forks.Process(target=_child, args=(list(command), deadly))
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


def _child(command: list[str], deadly: Deadly | Counting | None) -> None:
    from spillway.cli.main import run
    from spillway.hardware import timing
    from spillway.training import telling

    telling._TELLING_SECONDS = (
        math.inf
    )  # whether rates are kept for the next run would depend on how busy the machine is
    torch.set_num_threads(2)
    timing.ALONE_SECONDS = timing.TOGETHER_SECONDS = 0.02  # what a run is killed in is its training
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)
    if deadly is not None:
        deadly.arm()
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
    command: Callable[[Path], list[str]], directory: Path, kills: int, seed: int, longest: float
) -> Iterator[tuple[int, Path]]:
    """Train again and again, each time killed at a random instant and resumed until it ends by itself, until `kills`
    have hit. Yields the number of kills so far and the run directory whenever a training has come to its end."""
    random_instant = random.Random(seed)
    hit = rounds = 0
    while hit < kills:
        run = directory / f"run-{rounds}"
        rounds += 1
        while kill_after(start(command(run)), random_instant.uniform(0, longest)):
            hit += 1
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
