"""Which slabs a placement needs. Pools are per role and size class: none starves another, nothing is fragmented."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from spillway.spec.model import CallProfile, ModelProfile
from spillway.spec.plan import Kept, Placement, Pool

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


class Kinds:
    """Which units and which calls of a model are alike: most are, and what one of them takes, all of them take."""

    def __init__(self, model: ModelProfile) -> None:
        self.units = _numbers(
            (index in model.resident_units, unit.weight_bytes, unit.grad_bytes, unit.state_bytes, unit.num_trainable)
            for index, unit in enumerate(model.units)
        )
        self.calls = _numbers(
            (
                call.kind,
                call.act_bytes,
                call.saved_bytes,
                call.saved_count,
                call.chunks,
                call.operators,
                call.work_bytes,
                call.heap_bytes,
                call.differentiated,
                call.forks,
            )
            for call in model.calls
        )
        self.weight_classes = size_classes([unit.weight_bytes for unit in model.units])
        times = Counter(call.unit for call in model.calls)
        self.called_again = sum(count > 1 for count in times.values())  # units whose calls lie apart

    def placed(self, placement: Placement) -> "Placed":
        """Those that are placed alike, too; of calls none where no batch is known."""
        return Placed(
            _first_and_count(zip(self.units, map(id, placement.units), strict=True)),
            _first_and_count(zip(self.calls, map(id, placement.acts), strict=False)),
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """The first of the units, and of the calls, that are alike in size and place, and how many they are."""

    units: list[tuple[int, int]]
    calls: list[tuple[int, int]]


def _numbers(sizes: Iterable[object]) -> list[int]:
    known: dict[object, int] = {}
    return [known.setdefault(size, len(known)) for size in sizes]


def _first_and_count(kinds: Iterable[object]) -> list[tuple[int, int]]:
    every = list(kinds)
    first = dict(zip(reversed(every), range(len(every) - 1, -1, -1), strict=True))
    return [(first[kind], count) for kind, count in Counter(every).items()]


class SlabNames:
    """Names of the pool that serves each unit or call, and the pools themselves."""

    def __init__(self, model: ModelProfile, placement: Placement, kinds: Kinds | None = None) -> None:
        self._model = model
        self._placement = placement
        self._kinds = kinds or Kinds(model)
        self._classes = self._kinds.weight_classes
        self.placed = self._kinds.placed(placement)
        sizes = {first: self.act_bytes(first) for first, _ in self.placed.calls}
        classes = size_classes(list(sizes.values()))
        self._act_classes = dict(zip(sizes.values(), classes, strict=True))

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

    def grad_sum(self, unit: int) -> str:
        """Host slabs that gradients of several backwards are summed in, where the sum is at rest on the drives."""
        return f"grad-sum/{self._classes[unit]}"

    def lands_in_slab(self, unit: int) -> bool:
        """Whether a gradient passes through a slab, instead of landing in the unit's own buffer."""
        plan = self._placement
        return not plan.keeps_gradient(unit) or plan.units[unit].grads == "disk" or plan.accumulation > 1

    def sums_in_slab(self, unit: int) -> bool:
        """Whether gradients of several backwards are summed in a slab, between which the sum is on the drives."""
        return self._placement.units[unit].grads == "disk" and self._placement.accumulation > 1

    def sums_on_device(self, unit: int) -> bool:
        """Whether gradients of several backwards are summed where they stay on the device, each of them first by
        itself in a slot, as those are that are summed elsewhere: the same bits. (Not those of parameters that are used
        outside of calls, which gather all through a backward.)"""
        plan, is_resident = self._placement, unit in self._model.resident_units
        return plan.accumulation > 1 and plan.units[unit].states == "device" and not is_resident

    def act(self, call: int) -> str:
        """Host slabs that keep or pass on unit inputs."""
        return f"act-{self._placement.acts[call].tier}/{self._act_classes[self.act_bytes(call)]}"

    def act_bytes(self, call: int) -> int:
        """What is kept of a call between forward and backward."""
        return stored_bytes(self._model.calls[call], self._placement.acts[call])

    def act_slot(self, call: int) -> str:
        """Device slots that unit inputs come back to."""
        return f"act-slot/{self._act_classes[self.act_bytes(call)]}"

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
        grad_slots = plan.grad_slots + self._kinds.called_again
        for index, times in self.placed.units:
            unit, where = self._model.units[index], plan.units[index]
            trained = unit.num_trainable > 0 and where.states != "device"
            if where.weights != "device":
                need(self.slot(index), "device", unit.weight_bytes, plan.window, times)
            if where.weights == "disk":
                need(self.weight(index), "host", unit.weight_bytes, 2, times)
            if (trained and index not in self._model.resident_units) or self.sums_on_device(index):
                need(self.grad_slot(index), "device", unit.grad_bytes, grad_slots, times)
            if trained and self.lands_in_slab(index):
                need(self.grad(index), "host", unit.grad_bytes, 2, times)
            if trained and self.sums_in_slab(index):
                need(self.grad_sum(index), "host", unit.grad_bytes, 2, times)
            if where.weights == "device" and where.states == "disk" and trained:
                need("refresh", "host", unit.weight_bytes, 1, times)
            if trained and "disk" in (where.states, where.weights, where.grads):
                elements = min(plan.subgroup, unit.num_trainable)
                slab = state_slab_bytes(elements, self._model.update_bytes)
                need("state", "host", slab, plan.state_slabs, times * -(-unit.num_trainable // plan.subgroup))
            if trained and where.visits:
                elements = min(plan.subgroup, unit.num_trainable)
                need("state-slot", "device", state_slab_bytes(elements, self._model.update_bytes), 2, times)
        for index, times in self.placed.calls:
            tier, size = plan.acts[index].tier, self.act_bytes(index)
            if tier != "device" and size:
                need(self.act(index), "host", size, every if tier == "host" else 3, times)
                need(self.act_slot(index), "device", size, 2, times)
        return tuple(Pool(name, tiers[name], sizes[name], counts[name]) for name in tiers)


def stored_bytes(call: CallProfile, kept: Kept) -> int:
    """Bytes of what is kept of a call."""
    if not call.differentiated:
        return 0
    if kept.everything:
        return call.act_bytes + call.saved_room
    return call.act_bytes + sum(operator.num_bytes for operator in call.operators if operator.name in kept.tape)


def recomputed_flops(call: CallProfile, kept: Kept) -> float:
    """What backward has to compute again of a call."""
    if kept.everything or not call.differentiated:
        return 0.0
    return call.flops - sum(operator.flops for operator in call.operators if operator.name in kept.tape)


def act_lease(call: int) -> str:
    """That of the device slab which what was kept of a call comes back to."""
    return f"as{call}"


def state_slab_bytes(elements: int, bytes_per_element: int) -> int:
    """A slab that holds one subgroup: its components one after another, each at a whole page."""
    padded = -(-elements // ELEMENT_ALIGNMENT) * ELEMENT_ALIGNMENT
    return padded * bytes_per_element
