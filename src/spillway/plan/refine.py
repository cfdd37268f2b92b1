"""In-situ profiling (LoHan, section IV-B): the machine as a step on it has shown it to be."""

from dataclasses import replace

from spillway.plan.simulate import simulate
from spillway.spec.hardware import HardwareSpec
from spillway.spec.plan import Op, Pool
from spillway.spec.trace import Trace

# The rate that the work of each lane goes at.
RATES = {
    "compute": "device_flops_per_s",
    "upload": "upload_bytes_per_s",
    "download": "download_bytes_per_s",
    "read": "read_bytes_per_s",
    "write": "write_bytes_per_s",
    "update": "update_params_per_s",
    "device": "device_update_params_per_s",
}
# Lanes that share a resource change each other's time, so rates are found in turns.
_TURNS = 4
# A lane that was busy for a smaller part of the step says little of its rate.
_TELLING_SHARE = 0.02
_MOST = 4.0  # times as fast or as slow: beyond that something else was going on


def refined(hardware: HardwareSpec, ops: tuple[Op, ...], pools: tuple[Pool, ...], measured: Trace) -> HardwareSpec:
    """The rates with which every lane of this list is predicted to be busy for as long as it was measured."""
    busy, seen = measured.busy_s(), hardware
    for _ in range(_TURNS):
        predicted = simulate(ops, pools, seen).busy_s()
        changed = {}
        for lane, name in RATES.items():
            if busy.get(lane, 0.0) < _TELLING_SHARE * measured.seconds or not predicted.get(lane):
                continue
            first = getattr(hardware, name)
            rate = getattr(seen, name) * predicted[lane] / busy[lane]
            changed[name] = min(max(rate, first / _MOST), first * _MOST)
            if lane == "update":
                changed["checksum_params_per_s"] = hardware.checksum_params_per_s * changed[name] / first
        seen = replace(seen, **changed)
    return seen
