"""The memory of the plan in force."""

import torch

from spillway.hardware.limits import process_bytes
from spillway.spec.hardware import Budget
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Placement, Plan, Pool, TierPeaks
from spillway.store.placed import PlacedStore

MIB = 1 << 20
BUDGET = 600 * MIB
NOTHING = ModelProfile((), ())


def plan(host_slabs: int, device_slots: int) -> Plan:
    """Of slabs and slots of 64 MiB each; its peak is all of them."""
    pools = (Pool("state", "host", 64 * MIB, host_slabs), Pool("slot", "device", 64 * MIB, device_slots))
    peak = 64 * MIB * (host_slabs + device_slots)
    return Plan(Placement((), (), "serial", False, 1, 1, 1, 1), pools, (), peaks=TierPeaks(0, peak, 0))


def test_slabs_that_the_next_plan_has_not_are_given_back_where_its_slots_need_their_memory() -> None:
    taken: list[torch.Tensor] = []

    def on_device(num_bytes: int) -> torch.Tensor:
        taken.append(torch.ones(num_bytes, dtype=torch.uint8))
        return taken[-1]

    store = PlacedStore([], None, Budget(0, BUDGET, 0, 0), on_device, lambda _: lambda: None, ())
    before = process_bytes()
    store.open(plan(8, 1), NOTHING)
    for host_slabs, device_slots in ((8, 1), (2, 7), (8, 1)):
        taken.clear()
        store.lay_slabs(plan(host_slabs, device_slots))
        assert process_bytes() - before < BUDGET + 16 * MIB, (host_slabs, device_slots)
    store.lay_slabs(plan(6, 1))
    assert process_bytes() - before > 64 * MIB * 8, "nobody needed them: taking them again would cost time"
    store.close()
