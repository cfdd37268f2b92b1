"""Which slabs a placement needs. Pools are per role and size class: none starves another, nothing is fragmented."""

from collections import Counter

from spillway.spec.model import CallProfile, ModelProfile
from spillway.spec.plan import Placement, Pool, act_tier, keeps_all

ELEMENT_ALIGNMENT = 4096  # subgroups start at whole pages in every component, 16-bit ones included


def size_classes(sizes: list[int]) -> list[int]:
    """The class of each size; sizes within a factor of two share a class, and with it slabs of the largest of them."""
    classes: dict[int, int] = {}
    largest, number = 0, -1
    for size in sorted(set(sizes), reverse=True):
        if number < 0 or 2 * size < largest:
            largest, number = size, number + 1
        classes[size] = number
    return [classes[size] for size in sizes]


class SlabNames:
    """Names of the pool that serves each unit or call, and the pools themselves."""

    def __init__(self, model: ModelProfile, placement: Placement) -> None:
        self._model = model
        self._placement = placement
        self._classes = size_classes([unit.weight_bytes for unit in model.units])
        calls = range(len(model.calls) if placement.acts else 0)
        self._act_classes = size_classes([self.act_bytes(call) for call in calls])

    def weight(self, unit: int) -> str:
        """Host slabs that weights pass through between disk and device."""
        return f"weight/{self._classes[unit]}"

    def slot(self, unit: int) -> str:
        """Device slots that hold a unit's weights while it computes."""
        return f"slot/{self._classes[unit]}"

    def grad_slot(self, unit: int) -> str:
        """Device slots that a unit's gradients are summed in."""
        return f"grad-slot/{self._classes[unit]}"

    def grad(self, unit: int) -> str:
        """Host slabs that gradients land in."""
        return f"grad/{self._classes[unit]}"

    def lands_in_slab(self, unit: int) -> bool:
        """Whether a gradient passes through a slab, instead of landing in the unit's own buffer."""
        plan = self._placement
        return not plan.keeps_gradient(unit) or plan.units[unit].grads == "disk" or plan.accumulation > 1

    def act(self, call: int) -> str:
        """Host slabs that keep or pass on unit inputs."""
        return f"act-{act_tier(self._placement.acts[call])}/{self._act_classes[call]}"

    def act_bytes(self, call: int) -> int:
        """What is kept of a call between forward and backward."""
        return stored_bytes(self._model.calls[call], self._placement.acts[call])

    def act_slot(self, call: int) -> str:
        """Device slots that unit inputs come back to."""
        return f"act-slot/{self._act_classes[call]}"

    def all(self) -> tuple[Pool, ...]:
        """Every pool this placement uses, with as many slabs as its lanes can keep busy."""
        tiers: dict[str, str] = {}
        sizes: dict[str, int] = {}
        counts: dict[str, int] = {}

        def need(name: str, tier: str, slab_bytes: int, most: int, times: int) -> None:
            tiers[name] = tier
            sizes[name] = max(sizes.get(name, 0), slab_bytes)
            counts[name] = min(counts.get(name, 0) + times, most)

        plan, every = self._placement, len(self._model.calls)
        grad_slots = self._grad_slots_needed()
        for index, times in self._distinct_units():
            unit, where = self._model.units[index], plan.units[index]
            trained = unit.num_trainable > 0 and where.states != "device"
            if where.weights != "device":
                need(self.slot(index), "device", unit.weight_bytes, plan.window, times)
            if where.weights == "disk":
                need(self.weight(index), "host", unit.weight_bytes, 2, times)
            if trained and index != self._model.resident_unit:
                need(self.grad_slot(index), "device", unit.grad_bytes, grad_slots, times)
            if trained and self.lands_in_slab(index):
                need(self.grad(index), "host", unit.grad_bytes, 2, times)
            if where.weights == "device" and where.states == "disk" and trained:
                need("refresh", "host", unit.weight_bytes, 1, times)
            if trained and "disk" in (where.states, where.weights, where.grads):
                elements = min(plan.subgroup, unit.num_trainable)
                slab = state_slab_bytes(elements, self._model.update_bytes)
                need("state", "host", slab, plan.state_slabs, times * -(-unit.num_trainable // plan.subgroup))
        for index, times in self._distinct_calls():
            tier, size = act_tier(plan.acts[index]), self.act_bytes(index)
            if tier != "device" and size:
                need(self.act(index), "host", size, every if tier == "host" else 3, times)
                need(self.act_slot(index), "device", size, 2, times)
        return tuple(Pool(name, tiers[name], sizes[name], counts[name]) for name in tiers)

    def _distinct_units(self) -> list[tuple[int, int]]:
        """The first of the units that are alike in size and place, and how many they are: most of a model are."""
        kinds: dict[object, list[int]] = {}
        for index, (unit, where) in enumerate(zip(self._model.units, self._placement.units, strict=True)):
            resident = index == self._model.resident_unit
            kind = (where, resident, unit.weight_bytes, unit.grad_bytes, unit.num_trainable)
            kinds.setdefault(kind, []).append(index)
        return [(alike[0], len(alike)) for alike in kinds.values()]

    def _distinct_calls(self) -> list[tuple[int, int]]:
        """The same of calls."""
        kinds: dict[object, list[int]] = {}
        for index, (call, acts) in enumerate(zip(self._model.calls, self._placement.acts, strict=True)):
            kinds.setdefault((acts, call.act_bytes, call.saved_bytes, call.chunks), []).append(index)
        return [(alike[0], len(alike)) for alike in kinds.values()]

    def _grad_slots_needed(self) -> int:
        """Two, so that a download overlaps the next backward, and one for every unit whose calls lie apart."""
        calls = [call.unit for call in self._model.calls]
        return 2 + sum(count > 1 for count in Counter(calls).values())


def stored_bytes(call: CallProfile, acts: str) -> int:
    """Bytes of what is kept of a call: its input, or all that autograd saves."""
    return call.kept_bytes if keeps_all(acts) else call.act_bytes


def state_slab_bytes(elements: int, bytes_per_element: int) -> int:
    """A slab that holds one subgroup: its components one after another, each at a whole page."""
    padded = -(-elements // ELEMENT_ALIGNMENT) * ELEMENT_ALIGNMENT
    return padded * bytes_per_element
