"""Our optimizer step beside torch.optim.AdamW and DeepSpeed's CPU Adam: the same job, in turns, in one run.

    python benchmarks/adamw.py [--params 64M] [--rounds 7] [--deepspeed PYTHON] [--json FILE] [--check]

The job: a bfloat16 gradient comes in, the states are updated, a new bfloat16 weight comes out. PyTorch and DeepSpeed
keep fp32 masters, so their casts belong to it. DeepSpeed is an extra (`pip install .[bench]`), or the interpreter of
another environment that has it (`--deepspeed`); both sides then use the same number of threads. Targets: exact at least
1.5 times DeepSpeed's parameters per second, 8-bit at least 2.5 times, exact at least 0.9 of the measured bandwidth.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import psutil
import torch
from ending import exit_code, parser_of, write_json

from spillway.optim.update import Hyper, StateRange, split_master, update_range
from spillway.spec.state import StateFormat
from spillway.store.arena import Arena

FORMS = {
    "exact": StateFormat(),
    "bfloat16 moments": StateFormat("adamw", "bfloat16"),
    "8-bit moments": StateFormat("adamw", "8bit"),
    "8-bit moments, 24-bit master": StateFormat("adamw", "8bit", 8),
    "lion": StateFormat("lion"),
    "sgd": StateFormat("sgd"),
}
# Read and written per parameter: gradient 2, weight 2 + 2, and what is kept, twice.
BYTES = {"exact": 26, "bfloat16 moments": 18, "8-bit moments": 14.06, "8-bit moments, 24-bit master": 12.06,
         "lion": 18, "sgd": 18}  # fmt: skip
# More than asked for: arrays a power of two apart take each other's place in the first cache, and units of real models
# have other sizes.
ODD = 3 << 14
HYPER = Hyper(1e-4, 0.9, 0.999, 1e-8, 0.01, 10)


@dataclass(frozen=True)
class Result:
    """Parameters per second, median over the rounds."""

    name: str
    threads: int
    params_per_s: float
    bytes_per_s: float  # counted, 0 where it is not ours to count


def allocate(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory as the arena gives it."""
    return Arena(elements * dtype.itemsize).buffer[: elements * dtype.itemsize].view(dtype)


def ours(form: StateFormat, params: int, threads: int) -> Callable[[], None]:
    """One step of ours."""
    moment = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}[form.moments]
    weight, low = allocate(params, torch.bfloat16), None
    upper, lower = split_master(torch.randn(params))
    weight.copy_(upper)
    low = allocate(params, torch.int16 if form.low_bits == 16 else torch.uint8)
    low.copy_(lower if form.low_bits == 16 else lower.to(torch.uint8))
    grad = allocate(params, torch.bfloat16)
    grad.copy_(torch.randn(params) * 1e-2)
    v = allocate(params, moment) if form.has_v else None
    scales = allocate(params // 32, torch.uint8) if form.moments == "8bit" else None
    state = StateRange(form, 0, weight, low, allocate(params, moment), v, scales, grad)
    return lambda: update_range(state, HYPER, 1.0, threads)


def torch_adamw(params: int, threads: int) -> Callable[[], None]:
    """torch.optim.AdamW(fused=True) on fp32 masters, with its casts."""
    torch.set_num_threads(threads)
    master = torch.nn.Parameter(torch.randn(params))
    wide = master.grad = torch.empty_like(master)
    grad, weight = (torch.randn(params) * 1e-2).bfloat16(), master.detach().bfloat16()
    optimizer = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        torch.set_num_threads(threads)
        wide.copy_(grad)
        optimizer.step()
        weight.copy_(master.detach())

    return step


_DEEPSPEED = """
import sys, time, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
params, threads, rounds = map(int, sys.argv[1:])
torch.set_num_threads(threads)
master = torch.nn.Parameter(torch.randn(params))
master.grad = torch.empty_like(master)
grad, weight = (torch.randn(params) * 1e-2).bfloat16(), master.detach().bfloat16()
optimizer = DeepSpeedCPUAdam([master], lr=1e-4, weight_decay=0.01, adamw_mode=True)
def step():
    master.grad.copy_(grad)
    optimizer.step()
    weight.copy_(master.detach())
step()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    step()
    print(time.perf_counter() - start, flush=True)
"""


class DeepSpeed:
    """DeepSpeedCPUAdam in a process of its own, one step at a time when asked."""

    def __init__(self, python: str, params: int, threads: int) -> None:
        command = [python, "-c", _DEEPSPEED, str(params), str(threads), "0"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while (line := self._line()) != "ready":
            if self._child.poll() is not None:
                raise RuntimeError(f"DeepSpeed could not be started by {python}: {line}")

    def seconds(self) -> float:
        """Of one step."""
        if self._child.stdin is None:
            raise RuntimeError("the child has no input")
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()

    def _line(self) -> str:
        if self._child.stdout is None:
            raise RuntimeError("the child has no output")
        return self._child.stdout.readline().strip()


def timed(step: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def bandwidth(threads: int) -> Callable[[], float]:
    """Bytes a second, read and written, of a plain copy."""
    torch.set_num_threads(threads)
    source, target = torch.ones(1 << 27), torch.empty(1 << 27)
    target.copy_(source)

    def measure() -> float:
        torch.set_num_threads(threads)
        return 2 * 4 * source.numel() / timed(lambda: target.copy_(source))

    return measure


def measure(params: int, threads: int, rounds: int, deepspeed: str | None) -> tuple[list[Result], float]:
    """All of them in turns; and the copy bandwidth."""
    steps = {name: ours(form, params, threads) for name, form in FORMS.items()}
    steps["torch.optim.AdamW(fused=True)"] = torch_adamw(params, threads)
    other = DeepSpeed(deepspeed, params, threads) if deepspeed else None
    copy = bandwidth(threads)
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    theirs, rates = [], []
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step))
        if other is not None:
            theirs.append(other.seconds())
        rates.append(copy())
    if other is not None:
        times["DeepSpeedCPUAdam"] = theirs
        other.close()
    results = []
    for name, seconds in times.items():
        rate = params / statistics.median(seconds)
        results.append(Result(name, threads, rate, rate * BYTES.get(name, 0)))
    return results, statistics.median(rates)


def main() -> int:
    """Print and save; with --check, 1 where a target is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--params", default="64M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--deepspeed", metavar="PYTHON")
    given = parser.parse_args()
    params = (int(given.params.removesuffix("M")) << 20) + ODD
    python = given.deepspeed or _own_deepspeed()
    found, missed = [], []
    cores = psutil.cpu_count(logical=True) or 1
    for threads in sorted({1, *(n for n in (2, 4, 8, 16, 32) if n < cores), cores}):
        results, copied = measure(params, threads, given.rounds, python)
        found += [asdict(result) for result in results]
        rate = {result.name: result.params_per_s for result in results}
        print(f"{threads} thread(s), copy {copied / 1e9:.1f} GB/s read and written")
        for result in results:
            moved = f", {result.bytes_per_s / 1e9:5.1f} GB/s" if result.bytes_per_s else ""
            print(f"  {result.name:32} {result.params_per_s / 1e9:6.3f} G parameters/s{moved}", flush=True)
        targets = [("exact over copy bandwidth", rate["exact"] * BYTES["exact"] / copied, 0.9)]
        if "DeepSpeedCPUAdam" in rate:
            targets.append(("exact over DeepSpeed", rate["exact"] / rate["DeepSpeedCPUAdam"], 1.5))
            targets.append(("8-bit over DeepSpeed", rate["8-bit moments"] / rate["DeepSpeedCPUAdam"], 2.5))
        targets.append(("exact over torch fused", rate["exact"] / rate["torch.optim.AdamW(fused=True)"], 1.0))
        for name, ratio, target in targets:
            print(f"  {name}: {ratio:.2f} (target {target})")
            if threads == cores and ratio < target:
                missed.append(f"{name} is {ratio:.2f} with {threads} threads, {target} is the target")
    write_json(given.json, found)
    return exit_code(given.check, missed)


def _own_deepspeed() -> str | None:
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        print("DeepSpeed is not installed here: without it (pip install .[bench], or --deepspeed PYTHON)")
        return None
    return sys.executable


if __name__ == "__main__":
    sys.exit(main())
