"""The papers' tables and figures, from the catalogue alone: their planners as policies of ours, beside our own.

    python benchmarks/papers.py [--json FILE] [--markdown FILE] [--check]

Every figure is simulated: the plan that the policy makes for the papers' machine, with makers' bandwidths and the block
rate that Fuyou measured. Models have the papers' shapes and bytes: 16-bit weights beside a 32-bit master (14 bytes
read, 14 written by an update; our own planner has ours, 12 and 12), and fused kernels (32 bytes of activations per
token, width and block: their 213 GB of the 13B model at 32 rows). Target: within 15 % of the paper, or a reason why
not.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ending import exit_code, parser_of, write_json

from spillway.hardware.catalogue import GPUS, find_machine
from spillway.hardware.catalogue import build as build_machine
from spillway.plan.bounds import phases
from spillway.plan.make import fits, make_plan
from spillway.plan.request import PlanRequest
from spillway.plan.simulate import simulate
from spillway.plan.swap import outputs, step_curve
from spillway.planning.question import GPT_SHAPES
from spillway.spec.errors import PlanInfeasible
from spillway.spec.hardware import Budget
from spillway.spec.machine import Machine
from spillway.spec.model import CallProfile, ModelProfile, OperatorClass, UnitProfile
from spillway.spec.plan import Plan

TARGET = 0.15
SEQUENCE, VOCABULARY = 1024, 50257
_MICRO_ROWS = (8, 4, 2, 1)  # computed at a time inside a unit: the most that fits
THEIRS, OURS = 11, 10  # bytes of optimizer state per parameter that an update moves besides the weights


@dataclass(frozen=True)
class Row:
    """A figure of a paper, what the policy gives, and what our own planner gives in the same place."""

    section: str
    what: str
    paper: float
    found: float
    ours: float | None = None
    unit: str = ""
    why: str = ""  # it is not within the target
    is_input: bool = False  # a rate or a size here was taken from it

    @property
    def is_close(self) -> bool:
        """Whether it is within the target."""
        return not self.is_input and self._is_close

    @property
    def _is_close(self) -> bool:
        return abs(self.found / self.paper - 1) <= TARGET if self.paper else self.found == 0


@cache
def gpt(layers: int, hidden: int, rows: int, state_bytes: int, micro: int = 8) -> ModelProfile:
    """A GPT of the papers' shape and bytes on so many rows of 1,024 tokens."""
    tokens, chunks = rows * SEQUENCE, -(-rows // micro)
    width = 2 * tokens * hidden  # bytes of one tensor between blocks
    block, table = 12 * hidden * hidden, VOCABULARY * hidden
    attention = 4 * rows * SEQUENCE**2 * hidden
    operators = (
        OperatorClass(f"matmul {4 * hidden}", 8.0 * tokens * hidden**2, width, 1),
        OperatorClass(f"matmul {hidden}", 16.0 * tokens * hidden**2, 8 * width, 3),
        OperatorClass("attention", float(attention), width, 1),
        OperatorClass("other", 0.0, 6 * width, 5, cheap=True),
    )

    def unit(name: str, params: int) -> UnitProfile:
        return UnitProfile(name, params, params, 2 * params, 2 * params, state_bytes * params)

    units = [unit("embedding", table), *(unit(f"block {n}", block) for n in range(layers)), unit("head", table)]
    # What is saved, as much as an 8h tensor for temporaries, one weight's gradient, and outputs with their gradients.
    work = 24 * width // chunks + 8 * hidden * hidden + 3 * width
    blocks = [
        CallProfile(n + 1, 2.0 * tokens * block + attention, width, 16 * width, "FORWARD", chunks, 8, operators, work)
        for n in range(layers)
    ]
    pieces = max(tokens // 512, 1)
    head = CallProfile(layers + 1, 2.0 * tokens * table, width, 0, "LOSS", pieces, 0, (), 2 * table + 2 * width)
    embedding = CallProfile(0, 0.0, 0, 0, work_bytes=2 * table + 2 * width)
    calls, update_bytes = (embedding, *blocks, head), 2 + 2 + state_bytes  # weight, gradient, states
    return ModelProfile(tuple(units), calls, tokens=tokens, update_bytes=update_bytes)


def shape(name: str, rows: int, policy: str, micro: int = 8) -> ModelProfile:
    """One of the papers' models, with the bytes of the policy's system."""
    layers, _, hidden = GPT_SHAPES[name]
    return gpt(layers, hidden, rows, OURS if policy == "auto" else THEIRS, micro)


def budget(machine: Machine) -> Budget:
    """Nine tenths of the host, most of the device."""
    return Budget(int(0.95 * machine.device_bytes), int(0.9 * machine.host_bytes), machine.disk_bytes, 2 << 30)


def plan(
    model: ModelProfile, machine: Machine, policy: str, update: str = "auto", activations: str = "auto"
) -> Plan | None:
    """None where it does not fit."""
    request = PlanRequest(update, activations=activations, policy=policy)
    try:
        return make_plan(model, machine.hardware, budget(machine), request)
    except PlanInfeasible:
        return None


def flops_per_s(model: ModelProfile, found: Plan) -> float:
    """Model FLOP/s: nothing computed twice counts twice."""
    return 3 * sum(call.flops for call in model.calls) / found.step_seconds


@cache
def speed(name: str, machine: Machine, policy: str, rows: int, update: str = "auto") -> float:
    """Model FLOP/s, 0 where it does not fit."""
    for micro in _MICRO_ROWS:
        model = shape(name, rows, policy, micro)
        found = plan(model, machine, policy, update)
        if found is not None:
            return flops_per_s(model, found)
    return 0.0


def best(name: str, machine: Machine, policy: str, batches: Iterable[int]) -> float:
    """The highest of these batches."""
    return max(speed(name, machine, policy, rows) for rows in batches)


def drives(machine: Machine, count: int) -> Machine:
    """The same machine with so many of its drives."""
    host = machine.hardware.host_bytes_per_s
    gpu = next(part for name, part in GPUS.items() if machine.name.startswith(name))
    return build_machine(machine.name, gpu, machine.drives[:1] * count, machine.host_bytes, host, gpu.pcie_generation)


def server(gpu: str, host: str = "768GB", count: int = 12) -> Machine:
    """The papers' server with another GPU, memory or number of drives."""
    return find_machine(f"{gpu}+{count}xp5510+{host}+server")


T = 1e12
BATCHES = (8, 16, 32, 64)


def throughput() -> Iterator[Row]:
    """13B and 175B against the baselines (LoHan, figure 5; Fuyou, figure 5)."""
    zero = "drives and the CPU's optimizer run at full rate here; DeepSpeed and Colossal-AI measure far below that"
    for gpu, ratios in (("rtx4090", (2.32, 3.46, 8.02)), ("rtx3090", (1.57, 2.48, 4.72))):
        machine = server(gpu)
        lohan, ours = best("gpt-13b", machine, "lohan", BATCHES), best("gpt-13b", machine, "auto", BATCHES)
        for policy, ratio in zip(("zero-offload", "zero-infinity", "colossal-ai"), ratios, strict=True):
            found = best("gpt-13b", machine, policy, BATCHES)
            what = f"13B on {gpu}: LoHan over {policy}"
            yield Row("throughput", what, ratio, lohan / found, ours / found, "x", zero)
    for name, share in (("gpt-13b", 92.5), ("gpt-175b", 53)):  # 90 to 95 % below 70B
        machine = server("rtx4090")
        peak = machine.hardware.device_flops_per_s / 100
        lohan, ours = (best(name, machine, policy, BATCHES) / peak for policy in ("lohan", "auto"))
        why = "updates of 175B wait for the CPU and the drives, which run at full rate here"
        what = f"{name.removeprefix('gpt-').upper()} on rtx4090: LoHan, of what a block reaches"
        yield Row("throughput", what, share, lohan, ours, "%", why)
    for gpu, rate in (("rtx4090", 156), ("a100-80", 202)):
        machine = server(gpu)
        found, ours = best("gpt-13b", machine, "fuyou", BATCHES), best("gpt-13b", machine, "auto", BATCHES)
        why = "the block's rate here was taken from it"
        yield Row("throughput", f"13B on {gpu}: Fuyou", rate, found / T, ours / T, "TFLOP/s", why, is_input=True)
    a100 = server("a100-80")
    fuyou, ours = best("gpt-13b", a100, "fuyou", BATCHES), best("gpt-13b", a100, "auto", BATCHES)
    for policy, ratio in (("zero-offload", 2.46), ("zero-infinity", 3.42), ("colossal-ai", 6.73)):
        found = best("gpt-13b", a100, policy, BATCHES)
        yield Row("throughput", f"13B on a100-80: Fuyou over {policy}", ratio, fuyou / found, ours / found, "x", zero)
    found = best("gpt-13b", server("rtx4090"), "zero-infinity", BATCHES)
    yield Row("throughput", "13B on rtx4090: ZeRO-Infinity", 45, found / T, None, "TFLOP/s", zero)
    for gpu, rate, batches in (("rtx4090", 87, (8, 16)), ("a100-80", 172, (8, 16, 32, 64))):
        machine = server(gpu)
        found, ours = best("gpt-175b", machine, "fuyou", batches), best("gpt-175b", machine, "auto", batches)
        why = "the paper's batch is limited by what one layer takes of the GPU; ours is cut within the layer"
        yield Row("throughput", f"175B on {gpu}: Fuyou", rate, found / T, ours / T, "TFLOP/s", why)


def anatomy() -> Iterator[Row]:
    """Seconds of the 13B model at 32 rows on a 4090 (LoHan, figure 1)."""
    machine = server("rtx4090")
    model = shape("gpt-13b", 32, "zero-infinity")
    rate = machine.hardware.device_flops_per_s
    forward = sum(call.flops for call in model.calls)
    yield Row("anatomy", "GPU forward", 5.96, forward / rate, None, "s")
    yield Row("anatomy", "recomputation", 5.7, forward / rate, None, "s")
    yield Row("anatomy", "GPU backward with recomputation", 17.6, 3 * forward / rate, None, "s")
    everything = sum(call.saved_bytes for call in model.calls)
    why = "the bytes of activations here were taken from it"
    yield Row("anatomy", "all activations", 213, everything / 1e9, None, "GB", why, is_input=True)
    between = sum(call.act_bytes for call in model.calls)
    yield Row("anatomy", "activations between blocks", 12.5, between / 1e9, None, "GB")
    link = machine.hardware.download_bytes_per_s
    yield Row("anatomy", "G10: all activations to the host", 10, everything / link, None, "s")
    infinity = plan(model, machine, "zero-infinity")
    if infinity is not None:
        trace = simulate(infinity.ops, infinity.pools, machine.hardware)
        busy = trace.busy_s()["compute"]
        last = max(span.end_s for span in trace.spans if span.lane == "compute")
        why = "DeepSpeed leaves transfers of forward and backward unoverlapped, and its drives below their rate"
        yield Row("anatomy", "ZeRO-Infinity: GPU busy", 0.36, busy / trace.seconds, None, "of a step", why)
        share = 1 - last / trace.seconds
        yield Row("anatomy", "ZeRO-Infinity: optimizer (30 to 60 %)", 0.45, share, None, "of a step", why)


def updates() -> Iterator[Row]:
    """What overlapping the update gains (LoHan, figure 7; Fuyou, figure 7), and swapping alone (Fuyou, figure 8)."""
    machine = server("rtx4090")
    lohan = speed("gpt-13b", machine, "lohan", 64)
    serial = serialised("gpt-13b", machine, 64)
    ours = speed("gpt-13b", machine, "auto", 64)
    longer = "their CPU optimizer takes longer than a pass over memory at its rate: there is more to hide"
    naive = "their CPU optimizer takes longer than a pass over memory at its rate: of a short step less of it hides"
    yield Row("updates", "13B, 64 rows: optimised over serialised", 1.33, lohan / serial, ours / serial, "x", longer)
    chain = "twelve drives at their rates do the chain of each block within its backward"
    chained = speed("gpt-13b", machine, "lohan", 64, update="overlap-naive")
    yield Row("updates", "13B, 64 rows: optimised over naive", 1.22, lohan / chained, ours / chained, "x", chain)
    for rows, gain in ((8, 1.09), (16, 1.25), (32, 1.38), (64, 1.22)):
        found, after = speed("gpt-13b", machine, "fuyou", rows), serialised("gpt-13b", machine, rows)
        own = speed("gpt-13b", machine, "auto", rows)
        yield Row("updates", f"13B, {rows} rows: overlapped over not", gain, found / after, own / after, "x", naive)
    pageable = "ZeRO-Infinity copies activations through pageable memory, which is not modelled"
    for gpu, gains in (("a100-80", (1.66, 1.88, 1.97)), ("rtx4090", (1.85, 1.92, 2.28))):
        for rows, gain in zip((8, 16, 32), gains, strict=True):
            found = serialised("gpt-13b", server(gpu), rows)
            infinity = speed("gpt-13b", server(gpu), "zero-infinity", rows)
            what = f"13B on {gpu}, {rows} rows: swapping alone over ZeRO-Infinity"
            yield Row("updates", what, gain, found / infinity, None, "x", pageable)


def serialised(name: str, machine: Machine, rows: int) -> float:
    """LoHan with its update after backward: its placement, the other mode."""
    model = shape(name, rows, "lohan")
    found = make_plan(model, machine.hardware, budget(machine), PlanRequest(policy="lohan"))
    fixed = replace(found.placement, update="serial")
    after = make_plan(model, machine.hardware, budget(machine), PlanRequest(fixed=fixed, activations="recompute"))
    return flops_per_s(model, after)


def swapping() -> Iterator[Row]:
    """Where the best amount of swapped activations lies (LoHan, figure 9b; Fuyou, figure 9): 0 for none."""
    for gpu, cases in (("rtx4090", ((24, 0), (36, 1), (48, 1), (60, 1))), ("a100-80", ((32, 0), (64, 1), (80, 1)))):
        machine = server(gpu)
        for rows, expected in cases:
            model = shape("gpt-13b", rows, "lohan")
            share, slow = optimum(model, machine), optimum(model, with_drives_at(machine, 0.5))
            what = f"13B on {gpu}, {rows} rows: more than inputs of blocks is swapped"
            why = f"the optimum is {share:.0%} of all activations at makers' bandwidths, {slow:.0%} at half the drives'"
            yield Row("swapping", what, expected, float(share > 0.05), None, "0 or 1", why)


def with_drives_at(machine: Machine, share: float) -> Machine:
    """With drives that keep so large a share of their rates."""
    rates = machine.hardware
    slower = replace(
        rates,
        read_bytes_per_s=share * rates.read_bytes_per_s,
        write_bytes_per_s=share * rates.write_bytes_per_s,
    )
    return replace(machine, hardware=slower)


def optimum(model: ModelProfile, machine: Machine) -> float:
    """Share of all activations that LoHan's closed form would move."""
    found = plan(model, machine, "lohan", activations="recompute")
    if found is None:
        return 0.0
    forward, backward = phases(model, found.placement)
    ordered = outputs(model, found.placement.acts, ("tape", "everything"))
    room = budget(machine).host_bytes - found.peaks.host
    curve = step_curve(forward, backward, ordered, machine.hardware, room)
    moved, _ = min(curve, key=lambda point: (round(point[1], 3), point[0]))
    return moved / sum(call.saved_bytes for call in model.calls)


def disks() -> Iterator[Row]:
    """How many drives it takes (LoHan, figure 10)."""
    why = "compute is the bound, with nearly all computed again: theirs moves more than drives have time for here"
    for rows, count in ((32, 12), (48, 6), (64, 3)):
        machine = server("rtx4090", count=count)
        found, ours = speed("gpt-13b", machine, "lohan", rows), speed("gpt-13b", machine, "auto", rows)
        yield Row("drives", f"13B, {rows} rows, {count} drives", 135, found / T, ours / T, "TFLOP/s", why)
    one, three = (speed("gpt-135b", server("rtx4090", count=n), "lohan", 16) for n in (1, 3))
    mine = [speed("gpt-135b", server("rtx4090", count=n), "auto", 16) for n in (1, 3)]
    yield Row("drives", "135B: 3 drives over 1 (near linear)", 3.0, three / one, mine[1] / mine[0], "x", why)
    per_dollar = {
        n: speed("gpt-175b", server("rtx4090", count=n), "fuyou", 16) / (1600 + 308 * n) for n in (1, 2, 3, 6, 12)
    }
    top = max(per_dollar, key=lambda n: per_dollar[n])
    yield Row("drives", "175B: drives at the best throughput per dollar (GPU and drives)", 6, top, None, "drives", why)


def sizes() -> Iterator[Row]:
    """The largest model at one row (LoHan, figure 6; Fuyou, figure 4; STRONGHOLD)."""
    why = "our runtime streams states in subgroups and pins little: the drives and the widest block are the bound here"
    for gpu, host, policy, size in (
        ("rtx4090", "768GB", "lohan", 276),
        ("rtx4080", "256GB", "lohan", 175),
        ("rtx4090", "128GB", "fuyou", 65),
        ("a100-80", "768GB", "fuyou", 805),
        ("rtx4090", "768GB", "zero-infinity", 135),
        ("rtx4090", "512GB", "zero-infinity", 65),
    ):
        machine = server(gpu, host)
        what = f"largest on {gpu} with {host}: {policy}"
        yield Row("sizes", what, size, largest(machine, policy), largest(machine, "auto"), "B", why)
    v100 = find_machine("v100+p5510+768GB+server")
    yield Row("sizes", "largest on v100 without disk: STRONGHOLD", 39.5, largest(v100, "stronghold"), None, "B", why)
    yield Row(
        "sizes", "largest on rtx4090: FlashNeuron", 1.55, largest(server("rtx4090"), "flashneuron"), None, "B", why
    )


@cache
def largest(machine: Machine, policy: str) -> float:
    """Billions of parameters of the largest model: as wide as one of the papers', and as deep as fits, in quarters of
    that one's depth and up to four times it."""
    most = 0.0
    widths = ((24, 2048), (40, 5120), (60, 6656), (80, 8192), (88, 11264), (96, 12288), (112, 14336), (128, 16384),
              (160, 20480))  # fmt: skip

    def model_of(depth: int, hidden: int) -> ModelProfile:
        return gpt(depth, hidden, 1, OURS if policy == "auto" else THEIRS)

    def has_room(model: ModelProfile) -> bool:
        return fits(model, machine.hardware, budget(machine), PlanRequest(policy=policy))

    for layers, hidden in reversed(widths):
        sizes = [sum(u.num_params for u in model_of(n * layers // 4, hidden).units) / 1e9 for n in range(1, 17)]
        low, high = bisect_right(sizes, most), len(sizes)  # so many are no larger than what was found
        while low < high:
            middle = (low + high) // 2
            if has_room(model_of((middle + 1) * layers // 4, hidden)):
                most, low = sizes[middle], middle + 1
            else:
                high = middle
    return most


def protrain() -> Iterator[Row]:
    """The plans ProTrain chose: blocks that are recomputed and swapped, the share of the chunks of states that persist
    on the device, and buffers for the others."""
    four = "the paper shards over four GPUs, so each holds a quarter of the states"
    for name, layers, hidden, gpu, rows, recomputed, swapped, persistent, buffers in (
        ("A: 1B, 8 rows, 3090", 32, 1600, "rtx3090", 8, 0, 0, 12 / 12, 0),
        ("A: 1B, 8 rows, A100", 32, 1600, "a100-80", 8, 0, 0, 12 / 12, 0),
        ("B: 1B, 64 rows, 3090", 32, 1600, "rtx3090", 64, 24, 2, 2 / 12, 3),
        ("C: 1B, 64 rows, A100", 32, 1600, "a100-80", 64, 0, 0, 12 / 12, 0),
        ("D: 10B, 8 rows, 3090", 48, 4096, "rtx3090", 8, 48, 0, 3 / 49, 46),
        ("E: 10B, 8 rows, A100", 48, 4096, "a100-80", 8, 0, 0, 15 / 49, 3),
    ):
        machine = find_machine(f"{gpu}+384GB+server")
        model = gpt(layers, hidden, rows // 4 or 1, THEIRS)
        found = make_plan(model, machine.hardware, budget(machine), PlanRequest(policy="protrain", has_store=False))
        blocks = found.placement.acts[1:-1]
        again = sum(not kept.everything for kept in blocks)
        moved = sum(kept.everything and kept.tier == "host" for kept in blocks)
        yield Row("protrain", f"{name}: recomputed blocks", recomputed, again, None, f"of {layers}", four)
        yield Row("protrain", f"{name}: swapped blocks", swapped, moved, None, f"of {layers}", four)
        units = found.placement.units
        lives = 100 * sum(where.states == "device" for where in units) / len(units)
        yield Row("protrain", f"{name}: states that persist", 100 * persistent, lives, None, "%", four)
        slots = found.placement.window if any(where.weights != "device" for where in units) else 0
        more = f"{four}, and a copy ahead of the next is enough where nothing else uses the link"
        yield Row("protrain", f"{name}: buffers", buffers, slots, None, "", more)


def windows() -> Iterator[Row]:
    """STRONGHOLD's gain from a larger window, and the update stride of Deep Optimizer States."""
    machine = find_machine("v100+p5510+768GB+server")
    model = gpt(50, 2560, 4, THEIRS)
    found = plan(model, machine, "stronghold", update="overlap")
    if found is not None:
        seconds = {}
        for window in (1, 2, 4, 8, 16):
            fixed = replace(found.placement, window=window)
            request = PlanRequest(fixed=fixed, activations="recompute")
            seconds[window] = make_plan(model, machine.hardware, budget(machine), request).step_seconds
        flat = min(window for window in seconds if seconds[window] <= 1.02 * min(seconds.values()))
        why = "lanes start the next copy at once; kernels of small layers on a real GPU leave gaps that more slots fill"
        yield Row("windows", "STRONGHOLD: window from which on it is flat", 8, flat, None, "slots", why)
    a100 = find_machine("a100-80+768GB+server")
    one = gpt(40, 5120, 4, THEIRS)
    pairs = {}
    for policy in ("zero-offload", "deep-optimizer-states"):
        made = make_plan(one, a100.hardware, budget(a100), PlanRequest(policy=policy, has_store=False))
        pairs[policy] = made.step_seconds
    ratio = pairs["zero-offload"] / pairs["deep-optimizer-states"]
    why = "the abstract names no machine; DeepSpeed's CPU update is slower than a pass over memory"
    yield Row("windows", "Deep Optimizer States over DeepSpeed's offload", 2.5, ratio, None, "x", why)


SECTIONS = (throughput, anatomy, updates, swapping, disks, sizes, protrain, windows)


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| | paper | their planner | ours | |", "|---|---:|---:|---:|---|"]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(f"| **{section}** | | | | |")
        ours = "" if row.ours is None else f"{row.ours:.3g} {row.unit}"
        why = "" if row.is_close else row.why
        lines.append(f"| {row.what} | {row.paper:g} {row.unit} | {row.found:.3g} {row.unit} | {ours} | {why} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table; with --check, 1 where a figure is off without a reason."""
    parser = parser_of(__doc__)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    for section in SECTIONS:
        for row in section():
            rows.append(row)
            mark = " " if row.is_close else "!"
            ours = "" if row.ours is None else f"{row.ours:8.3g}"
            print(
                f"{mark} {row.section:10} {row.what:72} {row.paper:8g} {row.found:8.3g} {ours:8} {row.unit}", flush=True
            )
    close, others = sum(row.is_close for row in rows), sum(not row.is_input for row in rows)
    print(f"{close} of {others} within {TARGET:.0%} of the paper; {len(rows) - others} are inputs")
    write_json(given.json, rows)
    if given.markdown:
        given.markdown.write_text(table(rows) + "\n")
    unexplained = [row for row in rows if not row.is_close and not row.why]
    missed = [f"{row.what}: {row.found:.3g} instead of {row.paper:g} {row.unit}" for row in unexplained]
    return exit_code(given.check, missed)


if __name__ == "__main__":
    sys.exit(main())
