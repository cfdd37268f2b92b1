"""`spillway plan --sweep` and `--max-size`: the same question asked many times over."""

from dataclasses import replace

from spillway.planning.figures import figures, report_on
from spillway.planning.question import Question, asked, with_drives
from spillway.spec.answers import Help, PlanReport
from spillway.spec.errors import PlanInfeasible, UsageError
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan
from spillway.spec.sizes import counted


def largest(question: Question) -> tuple[int, int]:
    """Most blocks of this model's width that can be trained, and their parameters. Raises PlanInfeasible where not even
    one can."""
    one, two = question.profile(layers=1), question.profile(layers=2)
    params_of = [sum(unit.num_params for unit in profile.units) for profile in (one, two)]
    question.plan(question.machine, one)

    def fit(layers: int) -> bool:
        return question.fits(question.machine, _repeat_blocks(two, layers))

    low, high = 1, 2
    while fit(high):
        low, high = high, 2 * high
    while high - low > max(low // 64, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low, params_of[0] + (low - 1) * (params_of[1] - params_of[0])


def plan_of_blocks(question: Question, layers: int) -> Plan:
    """The plan of the model with so many blocks. Raises PlanInfeasible."""
    return question.plan(question.machine, _repeat_blocks(question.profile(layers=2), layers))


def largest_as_help(question: Question) -> tuple[Help, ...]:
    """The largest model of this width, as a way out; none where not even one block fits, or blocks are not alike."""
    try:
        layers, params = largest(question)
    except (PlanInfeasible, UsageError):
        return ()
    change = f"{counted(layers, 'block')}, {params / 1e9:.1f}B parameters: the largest model of this width that fits"
    return (Help(change, 0.0),)


def sweep(question: Question, what: str) -> list[tuple[str, PlanReport]]:
    """Answers along one axis: batch, drives, host-memory, or bytes of activations that are moved instead of computed
    again. Raises UsageError for another, PlanInfeasible where there is nothing to move."""
    points: list[tuple[str, PlanReport]] = []
    machine, rows = question.machine, question.options.per_device_train_batch_size
    if what == "batch":
        for factor in (1, 2, 4, 8, 16, 32):
            changed = replace(question.options, gradient_accumulation_steps=factor)
            points.append((counted(rows * factor, "row"), report_on(asked(question, machine, changed))))
    elif what == "drives":
        for count in (1, 2, 3, 4, 6, 8, 12):
            points.append((counted(count, "drive"), report_on(asked(question, with_drives(machine, count)))))
    elif what == "host-memory":
        for size in (16, 32, 64, 128, 256, 512, 768, 1024):
            other = replace(machine, host_bytes=size * 10**9)
            free = replace(question.options, host_memory=None)
            points.append((f"{size} GB", report_on(asked(question, other, free))))
    elif what == "swapped":
        for moved, plan in question.swapped():
            points.append((f"{moved / 1e9:.1f} GB moved", figures(question, plan)))
    else:
        raise UsageError(f"--sweep {what} is not one of batch, drives, host-memory, swapped")
    return points


def _repeat_blocks(two: ModelProfile, layers: int) -> ModelProfile:
    """The profile of a model with `layers` alike blocks, from that of one with two."""
    blocks = [index for index in range(len(two.units) - 1) if _alike(two, index)]
    if not blocks:
        raise UsageError("--max-size needs a model whose blocks are all alike, and this one's are not")
    first = blocks[-1]
    units = [*two.units[: first + 1], *[two.units[first + 1]] * (layers - 1), *two.units[first + 2 :]]
    calls = []
    for call in two.calls:
        shift = layers - 2 if call.unit > first + 1 else 0
        if call.unit == first + 1:
            calls += [replace(call, unit=first + 1 + index) for index in range(layers - 1)]
        else:
            calls.append(replace(call, unit=call.unit + shift))
    moved = frozenset(unit + layers - 2 if unit > first + 1 else unit for unit in two.resident_units)
    return replace(two, units=tuple(units), calls=tuple(calls), resident_units=moved)


def _alike(profile: ModelProfile, index: int) -> bool:
    here, there = profile.units[index], profile.units[index + 1]
    return (here.num_params, here.weight_bytes) == (there.num_params, there.weight_bytes) and here.num_params > 0
