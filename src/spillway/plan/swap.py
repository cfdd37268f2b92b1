"""Which activations to keep instead of computing them again: LoHan's algorithm 1, over classes of operators.

Step time as a function of the bytes moved off the device is convex (LoHan IV-D): outputs are taken in the order of
FLOPs saved per byte moved, so what recomputation is left falls ever more slowly, and every other term grows linearly.
The first upturn is the optimum.
"""

from dataclasses import dataclass

from spillway.plan.bounds import Phase, phases
from spillway.spec.hardware import HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Kept, Placement

EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Output:
    """What may be kept of a call beyond what is kept already: outputs of a class of operators, or all the rest."""

    call: int
    name: str
    flops: float
    num_bytes: int

    @property
    def benefit(self) -> float:
        """FLOPs saved by each byte moved (LoHan, equation 6)."""
        return self.flops / self.num_bytes if self.num_bytes else float("inf")


def outputs(model: ModelProfile, acts: tuple[Kept, ...], keeps: tuple[str, ...]) -> list[Output]:
    """Of every call that is not kept on the device, in the order in which they are worth moving."""
    found = []
    for index in reversed(range(len(acts))):
        call, kept = model.calls[index], acts[index]
        if call.kind != "FORWARD" or kept.everything or (kept.tape and kept.tier == "device"):
            continue
        flops, num_bytes = call.flops, call.saved_room
        if "tape" in keeps:
            for operator in call.tapeable:
                flops, num_bytes = flops - operator.flops, num_bytes - operator.num_bytes
                if operator.name not in kept.tape:
                    found.append(Output(index, operator.name, operator.flops, operator.num_bytes))
        if EVERYTHING in keeps and (num_bytes > 0 or not call.tapeable):
            found.append(Output(index, EVERYTHING, max(flops, 0.0), max(num_bytes, 0)))
    return sorted(found, key=lambda output: -output.benefit)


def step_curve(
    forward: Phase, backward: Phase, ordered: list[Output], hardware: HardwareSpec, room: int
) -> list[tuple[int, float]]:
    """Bytes moved and seconds of a step after each output of the list, from none on (LoHan, equations 4 and 5; with
    the update's time, as in Fuyou). `room`: bytes of host memory they may take; more goes on to disk."""
    points, moved, flops = [], 0, 0.0
    for output in (None, *ordered):
        if output is not None:
            moved, flops = moved + output.num_bytes, flops + output.flops
        over = max(moved - room, 0)
        away = (forward + Phase(download=moved, write=over)).seconds(hardware)
        back = (backward + Phase(-flops, upload=moved, read=over)).seconds(hardware)
        points.append((moved, away + back))
    return points


def best_amount(
    model: ModelProfile,
    placement: Placement,
    hardware: HardwareSpec,
    keeps: tuple[str, ...],
    room: int,
    sees_disk: bool = True,
) -> list[Output]:
    """The outputs to move, until the step no longer gets faster."""
    ordered = outputs(model, placement.acts, keeps)
    forward, backward = phases(model, placement)
    if not sees_disk:
        forward, backward = forward.without_disk(), backward.without_disk()
    best, count = float("inf"), 0
    for number, (_, seconds) in enumerate(step_curve(forward, backward, ordered, hardware, room)):
        if seconds > best * (1 + 1e-9):
            break
        best, count = seconds, number
    return ordered[:count]


def with_outputs(acts: tuple[Kept, ...], chosen: list[Output], tier: str) -> tuple[Kept, ...]:
    """The same with these outputs kept, too, all of their calls in the given tier."""
    names: dict[int, list[str]] = {}
    for output in chosen:
        names.setdefault(output.call, []).append(output.name)
    changed = list(acts)
    for call, found in names.items():
        if EVERYTHING in found:
            changed[call] = Kept(tier, everything=True)
        else:
            changed[call] = Kept(tier, (*acts[call].tape, *found))
    return tuple(changed)
