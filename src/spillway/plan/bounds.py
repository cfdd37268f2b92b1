"""Closed forms: what no schedule of a placement can be faster than."""

from spillway.plan.pools import stored_bytes
from spillway.plan.updates import state_traffic
from spillway.spec.hardware import HardwareSpec
from spillway.spec.model import ModelProfile, UnitProfile
from spillway.spec.plan import Placement, UnitPlacement, act_tier, keeps_all


def lower_bound(model: ModelProfile, placement: Placement, hardware: HardwareSpec) -> float:
    """Seconds of the busiest resource in one forward and backward with its update: each lane has its bytes or FLOPs and
    its rate; a drive that reads and writes at once keeps `disk_together` of each rate; where the cores are shared, all
    that runs on them adds up. (LoHan's and Fuyou's maxima, for any placement.)"""
    used = {call.unit for call in model.calls} | {model.resident_unit}
    units = [pair for index, pair in enumerate(zip(model.units, placement.units, strict=True)) if index in used]
    seconds = {
        "compute": _flops(model, placement) / hardware.device_flops_per_s,
        "update": sum(unit.num_trainable for unit, _ in units) / hardware.update_params_per_s,
    }
    bytes_of = _traffic(model, placement, units)
    rates = {
        "read": hardware.read_bytes_per_s,
        "write": hardware.write_bytes_per_s,
        "upload": hardware.upload_bytes_per_s,
        "download": hardware.download_bytes_per_s,
    }
    seconds |= {lane: bytes_of[lane] / rate for lane, rate in rates.items()}
    drive = (seconds["read"] + seconds["write"]) / max(2 * hardware.disk_together, 1.0)
    cores = sum(seconds[lane] for lane in ("compute", "update", "upload", "download"))
    return max(*seconds.values(), drive, cores if hardware.cores_shared else 0.0)


def _flops(model: ModelProfile, placement: Placement) -> float:
    """Forward, the two products of backward and, unless all was kept, the forward again."""
    pairs = zip(model.calls, placement.acts, strict=True)
    return sum((3 if keeps_all(acts) else 4) * call.flops for call, acts in pairs)


def _traffic(
    model: ModelProfile, placement: Placement, units: list[tuple[UnitProfile, UnitPlacement]]
) -> dict[str, float]:
    """Bytes that every copying lane moves at least: what is in the window at the turn to backward is not fetched again,
    and weights on disk that a deferred update hands over are not read for forward."""
    moved = dict.fromkeys(("read", "write", "upload", "download"), 0.0)
    streamed = [(unit.weight_bytes, where) for unit, where in units if where.weights != "device"]
    stay = sum(sorted((size for size, _ in streamed), reverse=True)[: placement.window])
    for size, where in streamed:
        moved["upload"] += 2 * size
        if where.weights == "disk":
            moved["read"] += size if where.defers else 2 * size
    moved["upload"], moved["read"] = max(moved["upload"] - stay, 0.0), max(moved["read"] - stay, 0.0)
    for unit, where in units:
        if where.states == "none":
            continue
        read, written = state_traffic(where, unit.weight_bytes, unit.state_bytes, unit.grad_bytes)
        moved["read"] += read
        moved["write"] += written + (unit.grad_bytes if where.grads == "disk" else 0)
        if where.states != "device":
            moved["download"] += unit.grad_bytes
    for call, acts in zip(model.calls, placement.acts, strict=True):
        size, tier = stored_bytes(call, acts), act_tier(acts)
        if tier != "device":
            moved["download"] += size
            moved["upload"] += size
        if tier == "disk":
            moved["write"] += size
            moved["read"] += size
    return moved
