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


def test_slots_serve_a_shorter_batch_too_where_there_is_room() -> None:
    taken: list[int] = []

    def on_device(num_bytes: int) -> torch.Tensor:
        taken.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def slots(mib: int) -> Plan:
        pools = (Pool("act-slot", "device", mib * MIB, 2),)
        peaks = TierPeaks(2 * mib * MIB, 2 * mib * MIB, 0)
        return Plan(Placement((), (), "serial", False, 1, 1, 1, 1), pools, (), peaks=peaks)

    store = PlacedStore([], None, Budget(40 * MIB, 40 * MIB, 0, 0), on_device, lambda _: lambda: None, ())
    store.open(slots(16), NOTHING)
    for mib, expected in ((16, 2), (12, 0), (16, 0), (18, 2), (17, 0)):
        taken.clear()
        store.lay_slabs(slots(mib))
        assert len(taken) == expected, mib
        assert store.pools is not None and [slot.numel() for slot in store._buffers["act-slot"]] == 2 * [mib * MIB]
    store.close()
    tight = PlacedStore([], None, Budget(32 * MIB, 32 * MIB, 0, 0), on_device, lambda _: lambda: None, ())
    tight.open(slots(16), NOTHING)
    tight.lay_slabs(slots(16))
    taken.clear()
    crowded = slots(12)
    tight.lay_slabs(Plan(crowded.placement, crowded.pools, (), peaks=TierPeaks(30 * MIB, 30 * MIB, 0)))
    assert taken == 2 * [12 * MIB], "the plan's other memory needs what they do not"
    tight.close()
