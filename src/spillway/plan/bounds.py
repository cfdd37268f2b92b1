"""Closed forms: what no schedule of a placement can be faster than."""

from dataclasses import dataclass, replace

from spillway.plan.pools import recomputed_flops, size_classes, stored_bytes
from spillway.plan.updates import state_traffic
from spillway.spec.hardware import HardwareSpec
from spillway.spec.model import ModelProfile, UnitProfile
from spillway.spec.plan import Placement, UnitPlacement


@dataclass(frozen=True, slots=True)
class Phase:
    """What every resource has to do in a part of a step: FLOPs, parameters and bytes."""

    flops: float = 0.0
    updated: int = 0  # by the CPU
    visiting: int = 0  # by the device
    upload: float = 0.0
    download: float = 0.0
    read: float = 0.0
    write: float = 0.0

    def seconds(self, hardware: HardwareSpec) -> float:
        """Of the busiest resource: each lane at its rate; a drive that reads and writes at once keeps `disk_together`
        of each rate, a link that is used both ways `link_together`; where the cores are shared, all that runs on them
        adds up."""
        reading, writing = self.read / hardware.read_bytes_per_s, self.write / hardware.write_bytes_per_s
        on_cores = (
            self.flops / hardware.device_flops_per_s,
            self.updated / hardware.update_params_per_s,
            self.visiting / hardware.device_update_params_per_s,
            self.upload / hardware.upload_bytes_per_s,
            self.download / hardware.download_bytes_per_s,
        )
        drive = max(reading, writing, (reading + writing) / max(2 * hardware.disk_together, 1.0))
        link = (on_cores[3] + on_cores[4]) / max(2 * hardware.link_together, 1.0)
        cores = sum(on_cores) / max(2 * hardware.cores_together, 1.0) if hardware.cores_shared else 0.0
        return max(*on_cores, drive, link, cores)

    def seconds_in_turn(self, hardware: HardwareSpec) -> float:
        """Of all resources one after another."""
        return (
            self.flops / hardware.device_flops_per_s
            + self.updated / hardware.update_params_per_s
            + self.visiting / hardware.device_update_params_per_s
            + self.upload / hardware.upload_bytes_per_s
            + self.download / hardware.download_bytes_per_s
            + self.read / hardware.read_bytes_per_s
            + self.write / hardware.write_bytes_per_s
        )

    def times(self, count: int) -> "Phase":
        """So many of them."""
        moved = (self.upload * count, self.download * count, self.read * count, self.write * count)
        return Phase(self.flops * count, self.updated * count, self.visiting * count, *moved)

    def without_disk(self) -> "Phase":
        """The same as if drives took no time."""
        return replace(self, read=0.0, write=0.0)

    def on_drives(self) -> "Phase":
        """What the drives have to do of it."""
        return Phase(0.0, read=self.read, write=self.write)

    def __add__(self, other: "Phase") -> "Phase":
        return Phase(
            self.flops + other.flops,
            self.updated + other.updated,
            self.visiting + other.visiting,
            self.upload + other.upload,
            self.download + other.download,
            self.read + other.read,
            self.write + other.write,
        )


def busiest(model: ModelProfile, placement: Placement, hardware: HardwareSpec) -> float:
    """Seconds of the busiest resource in the forwards and backwards of a step with its update (LoHan's and Fuyou's
    maxima, for any placement)."""
    forward, backward, update = _parts(model, placement)
    return (_others(model, placement, forward + backward) + forward + backward + update).seconds(hardware)


def lower_bound(model: ModelProfile, placement: Placement, hardware: HardwareSpec) -> float:
    """Seconds that no order of the placement's operations takes less than. An update that comes after backward overlaps
    nothing of it but what is read ahead, and backward begins when forward is over with the late updates, all of which
    precede it but for the writing of what is in slabs."""
    forward, backward, update = _parts(model, placement)
    others = _others(model, placement, forward + backward)
    whole = others + forward + backward + update
    if placement.in_turn:
        return whole.seconds_in_turn(hardware)
    least = whole.seconds(hardware)
    computing = (others.flops + backward.flops) / hardware.device_flops_per_s
    if placement.update == "serial":
        after = replace(update, read=0.0, upload=0.0)
        least = max(least, forward.flops / hardware.device_flops_per_s + computing + after.seconds(hardware))
    deferring = [(unit, where) for unit, where in _used(model, placement) if where.defers]
    late = _update(deferring)
    # What is in slabs may be written in backward.
    heaviest = max((unit.updated_bytes / max(unit.num_trainable, 1) for unit, _ in deferring), default=0)
    in_slabs = placement.state_slabs * placement.subgroup * heaviest
    read_ahead = placement.ahead * placement.subgroup * heaviest  # in the backward before
    before = forward + late
    before = replace(before, read=max(before.read - read_ahead, 0.0), write=max(late.write - in_slabs, 0.0))
    return max(least, before.seconds(hardware) + computing)


def readable_ahead(model: ModelProfile, placement: Placement, hardware: HardwareSpec) -> float:
    """Bytes that the drives could read in backward while they would have nothing to do."""
    _, backward, _ = _parts(model, placement)
    idle = backward.seconds(hardware) - backward.on_drives().seconds(hardware)
    return max(idle, 0.0) * hardware.read_bytes_per_s


def least_computing(model: ModelProfile, hardware: HardwareSpec, accumulation: int) -> float:
    """Seconds of the forwards and backwards of a step of which nothing is computed again: no placement's bound is
    below."""
    flops = sum(call.flops + model.backward_flops(call) for call in model.calls)
    return accumulation * flops / hardware.device_flops_per_s


def is_held_up_by_recomputing(model: ModelProfile, placement: Placement, hardware: HardwareSpec) -> bool:
    """Whether the step, or its backward with the updates that may be made within it, could get faster by computing less
    again."""
    forward, backward, update = _parts(model, placement)
    again = sum(recomputed_flops(call, kept) for call, kept in zip(model.calls, placement.acts, strict=True))
    if placement.in_turn:
        return again > 0
    within = _update([(unit, where) for unit, where in _used(model, placement) if not where.defers])
    behind = backward if placement.update == "serial" else backward + within
    whole = _others(model, placement, forward + backward) + forward + backward + update
    parts = ((behind, again), (whole, again * placement.accumulation))
    return any((part + Phase(-more)).seconds(hardware) < part.seconds(hardware) for part, more in parts)


def phases(model: ModelProfile, placement: Placement) -> tuple[Phase, Phase]:
    """What a forward and a backward with its update have to do."""
    forward, backward, update = _parts(model, placement)
    return forward, backward if placement.update == "serial" else backward + update


def _others(model: ModelProfile, placement: Placement, one: Phase) -> Phase:
    """All forwards and backwards of a step but `one`, and what each backward but the first reads of gradients that are
    summed on disk."""
    if placement.accumulation == 1:
        return Phase()
    summed = Phase(read=sum(unit.grad_bytes for unit, where in _used(model, placement) if _spills(where)))
    return (one + summed).times(placement.accumulation - 1)


def _spills(where: UnitPlacement) -> bool:
    return where.states != "none" and where.grads == "disk"


def _parts(model: ModelProfile, placement: Placement) -> tuple[Phase, Phase, Phase]:
    """Forward, backward and update. What is in the window at the turn to backward is not fetched again, and weights on
    disk that a deferred update hands over are not read for forward."""
    units = _used(model, placement)
    weights = [(unit.weight_bytes, where) for unit, where in units if where.weights != "device"]
    on_disk = [(size, where) for size, where in weights if where.weights == "disk"]
    stay = _largest_of_each_class([size for size, _ in weights], placement.window)
    streamed = sum(size for size, _ in weights)
    gone_back = {id(model.units[call.unit]) for call in model.calls if call.differentiated}
    in_backward = [(unit.weight_bytes, where.weights) for unit, where in units if id(unit) in gone_back]
    streamed_back = sum(size for size, tier in in_backward if tier != "device")
    fetched_back = sum(size for size, tier in in_backward if tier == "disk")
    moved = {tier: 0 for tier in ("host", "disk")}
    flops = behind = again = 0.0
    for call, kept in zip(model.calls, placement.acts, strict=True):
        flops += call.flops
        behind += model.backward_flops(call)
        again += recomputed_flops(call, kept)
        if kept.tier != "device":
            moved[kept.tier] += stored_bytes(call, kept)
    both = sum(moved.values())
    forward = Phase(
        flops=flops,
        upload=streamed,
        download=both,
        read=sum(size for size, where in on_disk if not where.defers),
        write=moved["disk"],
    )
    backward = Phase(
        flops=behind + again,
        upload=max(streamed_back - stay, 0) + both,
        download=sum(unit.grad_bytes for unit, where in units if where.states not in ("none", "device")),
        read=max(fetched_back - stay, 0) + moved["disk"],
        write=sum(unit.grad_bytes for unit, where in units if _spills(where)),
    )
    return forward, backward, _update(units)


def _largest_of_each_class(sizes: list[int], window: int) -> int:
    """Every class of slots has a window of its own."""
    classes: dict[int, list[int]] = {}
    for size, number in zip(sizes, size_classes(sizes), strict=True):
        classes.setdefault(number, []).append(size)
    return sum(sum(sorted(found, reverse=True)[:window]) for found in classes.values())


def _used(model: ModelProfile, placement: Placement) -> list[tuple[UnitProfile, UnitPlacement]]:
    """The units that a step calls, and where they rest."""
    used = {call.unit for call in model.calls} | model.resident_units
    return [pair for index, pair in enumerate(zip(model.units, placement.units, strict=True)) if index in used]


def _update(units: list[tuple[UnitProfile, UnitPlacement]]) -> Phase:
    """All updates, whenever they are."""
    updated = visiting = 0
    upload = download = read = write = 0
    for unit, where in units:
        if where.states == "none":
            continue
        reads, writes = state_traffic(where, unit)
        read, write = read + reads, write + writes
        if where.update_lane == "device":
            visiting += unit.num_trainable
        else:
            updated += unit.num_trainable
        if where.visits:
            upload += unit.updated_bytes + unit.grad_bytes
            download += unit.updated_bytes
    return Phase(0.0, updated, visiting, upload, download, read, write)
