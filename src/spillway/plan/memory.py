"""Bytes of every tier that a placement takes at its peak."""

from dataclasses import dataclass

from spillway.plan.pools import Placed, stored_bytes
from spillway.spec.model import CallProfile, ModelProfile
from spillway.spec.plan import Kept, Placement, Plan, Pool, TierPeaks

# A GPU's allocator hands out what calls keep in blocks that are rounded up and do not always fit where others were.
_FRAGMENTED = 1.1
# The heap of the C library, where a CPU computes, keeps what was freed between other blocks: beside what a call needs,
# as much as calls took of the heap, and this much in all for what is kept (as Llamas of width 256 to 1536 take with 32
# to 2048 tokens).
_HEAP_OF_KEPT = 1.4

# Workspaces of matrix products, one for each stream and each thread that computes (forward and backward).
_STREAM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Residents:
    """Bytes that stay in a tier between steps, of one unit."""

    device: int
    host: int


def residents(model: ModelProfile, placement: Placement, unit: int) -> Residents:
    """What one unit keeps on device and host for good: weights, states, and gradients that wait for others."""
    profile, where = model.units[unit], placement.units[unit]
    device = host = 0
    if where.weights == "device":
        device += profile.weight_bytes
        if unit in model.resident_units or where.states == "device":
            device += profile.grad_bytes
    if where.states == "device":
        device += profile.state_bytes
    if where.has_host_weights:
        host += profile.weight_bytes
    if where.states == "host":
        host += profile.state_bytes
    if profile.num_trainable and grads_at_home(placement, unit):
        host += profile.grad_bytes
    return Residents(device, host)


def extents_of_units(placement: Placement) -> tuple[int, ...]:
    """Copies of each unit on disk. Those of the saved points that are kept and the one being written, where each step
    is a saved point. Where states also rest in host memory, saved points lie further apart and the step goes on writing
    beside the one that the next saved point will name: one more. A unit that is not trained never changes. Where
    steps are made in place there is one copy, of what rests on disk at least."""
    keep = placement.keep
    if not keep.last:
        return tuple(int(keep.of_memory or "disk" in (where.weights, where.states)) for where in placement.units)
    different = list(dict(zip(map(id, placement.units), placement.units, strict=True)).values())
    any_on_disk = any("disk" in (where.weights, where.states) for where in different)
    if all(where.states in ("disk", "none") for where in different):
        trained = keep.last + 1
    elif any_on_disk:
        trained = keep.last + 2
    else:
        trained = keep.last + 1 if keep.of_memory else 0
    frozen = 1 if any_on_disk or keep.of_memory else 0
    copies = {id(where): frozen if where.states == "none" else trained for where in different}
    return tuple(map(copies.__getitem__, map(id, placement.units)))


def grads_at_home(placement: Placement, unit: int) -> bool:
    """Whether the unit has a host gradient buffer of its own: the update, or another backward, comes later."""
    waits = placement.keeps_gradient(unit) or placement.accumulation > 1
    return waits and placement.units[unit].grads == "host"


def working_bytes(model: ModelProfile, call: CallProfile, kept: Kept) -> int:
    """Device memory that a call needs while it computes. Where it could not be measured: what autograd saves for one
    micro-batch, gradients of weights on their way, and as much again for temporaries. What is kept is counted as
    such."""
    if not call.work_bytes:
        return 2 * (call.saved_bytes + model.units[call.unit].weight_bytes) // call.chunks
    taken = (stored_bytes(call, kept) - call.act_bytes) // call.chunks
    return max(call.work_bytes - taken, call.act_bytes)


def _work_of_streams(model: ModelProfile, placement: Placement, placed: Placed) -> int:
    """Device memory that calls need while they compute. An allocator keeps what was freed for the stream it was taken
    on: room for the largest micro-batch on each, with gradients of weights until they are summed, and for the largest
    call on the one that they start from."""
    works = [
        (model.calls[first], working_bytes(model, model.calls[first], placement.acts[first]))
        for first, _ in placed.calls
    ]
    largest = max((work for _, work in works), default=0)
    if placement.streams == 1:
        return largest
    beside = max((work + model.units[call.unit].grad_bytes for call, work in works if call.forks), default=0)
    return largest + placement.streams * (beside + _STREAM_BYTES)


def phase_peaks(model: ModelProfile, plan: Plan, process_bytes: int, device_is_host: bool) -> dict[str, TierPeaks]:
    """Peak bytes per tier of a run's phases. Slabs, slots and what rests are taken when weights are loaded, and kept:
    an evaluation needs one unit's work beside them; a save writes the 16-bit weights beside the store. Where the CPU
    computes, its heap keeps what steps took. An export, a process of its own, holds nothing that grows with the
    model."""
    step, placement = plan.peaks, plan.placement
    resting = [residents(model, placement, unit) for unit in range(len(model.units))]
    pools = {tier: sum(pool.num_bytes for pool in plan.pools if pool.tier == tier) for tier in ("device", "host")}
    device = sum(part.device for part in resting) + pools["device"]
    host = process_bytes + sum(part.host for part in resting) + pools["host"]
    forward = device + max((call.work_bytes for call in model.calls), default=0)
    weights = sum(unit.weight_bytes for unit in model.units)
    later = step.host if device_is_host else host
    return {
        "load": TierPeaks(device, host + (device if device_is_host else 0), step.disk),
        "step": step,
        "evaluation": TierPeaks(min(forward, step.device), later, step.disk),
        "save": TierPeaks(device, later, step.disk + weights),
        "export": TierPeaks(0, process_bytes, step.disk + weights),
    }


def peaks(
    model: ModelProfile,
    placement: Placement,
    pools: tuple[Pool, ...],
    process_bytes: int,
    device_is_host: bool,
    extents: tuple[int, ...],
    placed: Placed,
) -> TierPeaks:
    """Peak bytes per tier. With the CPU as device its memory is host memory too. `extents`: copies of each unit's state
    kept on disk (0 without a store), per unit."""
    units = [(model.units[first], first, count) for first, count in placed.units]
    resting = [(residents(model, placement, first), count) for _, first, count in units]
    stored = [
        (placement.acts[first].tier, stored_bytes(model.calls[first], placement.acts[first]), count)
        for first, count in placed.calls
    ]
    device = sum(part.device * count for part, count in resting) + model.boundary_bytes
    work = _work_of_streams(model, placement, placed)
    on_device = sum(size * count for tier, size, count in stored if tier == "device")
    if device_is_host:
        heap = max((model.calls[first].heap_bytes for first, _ in placed.calls), default=0)
        device += work + heap + int(_HEAP_OF_KEPT * on_device)
    else:
        device += work + int(_FRAGMENTED * on_device)
        if placement.streams > 1:
            # The first forward of a schedule does not fork: what operators made then lay on the user's stream, whose
            # memory serves no other.
            device += sum(
                (stored_bytes(model.calls[first], placement.acts[first]) - model.calls[first].act_bytes) * count
                for first, count in placed.calls
                if placement.acts[first].tier == "device" and model.calls[first].differentiated
            )
    # Those of two calls may be on their way to host memory.
    moving = [size for tier, size, _ in stored if tier != "device"]
    device += 2 * max(moving, default=0)
    device += sum(pool.num_bytes for pool in pools if pool.tier == "device")
    host = process_bytes + sum(part.host * count for part, count in resting)
    host += sum(pool.num_bytes for pool in pools if pool.tier == "host")
    if model.calls_beside:
        # The largest unit fits beside the slots, and beside the slabs where it comes from the drives.
        beside = max(unit.weight_bytes for unit in model.units)
        device += beside
        host += beside if any(placement.units[first].weights == "disk" for _, first, _ in units) else 0
    disk = sum(extents[first] * (unit.weight_bytes + unit.state_bytes) * count for unit, first, count in units)
    disk += sum(unit.grad_bytes * count for unit, first, count in units if placement.units[first].grads == "disk")
    disk += sum(size * count for tier, size, count in stored if tier == "disk")
    return TierPeaks(device, host + (device if device_is_host else 0), disk)
