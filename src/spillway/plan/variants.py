"""When and where the units of a filled placement are updated."""

from collections.abc import Iterator
from dataclasses import replace

from spillway.plan.candidates import Candidate, Candidates
from spillway.plan.spare import spread
from spillway.spec.plan import Placement

# Of the updates that could be made within the step: how many are left to the next forward.
_FIRST_SHARE = 0.5  # the drive then has about as much to do in forward as in backward
_DEFERRED_SHARES = (0.25, 1.0)
_SMALLEST_VISIT = 1 << 18  # elements


class Variants:
    """The choices for one model, machine and space."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._model = candidates.model
        self._hardware = candidates.hardware
        self._request = candidates.request
        self._space = candidates.space

    def of(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same resting places with more and more updates left to the next forward, so that the drive has work all
        step long, in the end with all of them; and with some of them made on the device."""
        placement = candidate.placement
        if self._request.fixed is not None or not self._model.calls:
            yield candidate
            return
        for way in self._ways(candidate):
            variant = self._changed(placement, *way)
            if variant.placement == placement or self._candidates.fits(variant):
                yield variant

    def visiting(self, candidate: Candidate) -> Iterator[Candidate]:
        """Those of them with updates on the device, whether there is room for them or not: units that live there may
        make it."""
        if not self._model.calls or not self.may_visit:
            return
        for update, deferred, visiting in self._ways(candidate):
            if visiting:
                yield self._changed(candidate.placement, update, deferred, visiting)

    def in_other_modes(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same updates on the device at other moments; nothing where there are none, or the moment is given."""
        placement = candidate.placement
        if self._space.update != "auto" or self._request.fixed is not None or not placement.visits:
            return
        visiting = frozenset(unit for unit, where in enumerate(placement.units) if where.visits)
        for mode in self._space.policy.updates:
            variant = self._changed(placement, mode, frozenset(), visiting)
            if mode != placement.update and self._candidates.fits(variant):
                yield variant

    def _changed(
        self, placement: Placement, update: str, deferred: frozenset[int], visiting: frozenset[int]
    ) -> Candidate:
        subgroup = min(placement.subgroup, self._visit_elements) if visiting else placement.subgroup
        return self._candidates.of(replace(placement, update=update, subgroup=subgroup), deferred, visiting)

    def _ways(self, candidate: Candidate) -> Iterator[tuple[str, frozenset[int], frozenset[int]]]:
        placement, none = candidate.placement, frozenset[int]()
        trained = [unit for unit, where in enumerate(placement.units) if where.states != "none"]
        soon = [unit for unit in trained if not placement.units[unit].defers]
        may_defer = self._space.may_defer
        visiting = self._visitors(candidate, trained)
        if soon and may_defer:
            yield placement.update, spread(soon, _FIRST_SHARE), none
        if soon or not may_defer:
            yield placement.update, none, none
            if visiting:
                yield placement.update, none, visiting
        if not may_defer:
            return
        for share in _DEFERRED_SHARES if soon else (1.0,):
            yield ("deferred" if share == 1.0 else placement.update), spread(soon, share), none
        if visiting:
            yield "deferred", none, visiting
        if visiting and "serial" in self._space.policy.updates:
            yield "serial", none, visiting

    @property
    def may_visit(self) -> bool:
        """Whether updates may be made on the device of states that rest elsewhere."""
        return self._hardware.device != "cpu" and self._space.policy.strides

    @property
    def _visit_elements(self) -> int:
        """So few at a time that the way there, the update and the way back of several overlap."""
        largest = max(unit.num_trainable for unit in self._model.units)
        return max(1 << max(largest // 8, 1).bit_length(), _SMALLEST_VISIT)

    def _visitors(self, candidate: Candidate, trained: list[int]) -> frozenset[int]:
        """Every so-many-th unit whose states rest in host memory, so that the CPU and the link take equally long over
        them (Deep Optimizer States); none where the device is the CPU."""
        if not self.may_visit:
            return frozenset()
        units = [unit for unit in trained if candidate.placement.units[unit].states == "host"]
        moved = sum(self._model.units[unit].updated_bytes for unit in units)
        params = sum(self._model.units[unit].num_trainable for unit in units)
        if not params:
            return frozenset()
        on_cpu = params / self._hardware.update_params_per_s
        on_link = moved / min(self._hardware.upload_bytes_per_s, self._hardware.download_bytes_per_s)
        return spread(units, on_cpu / (on_cpu + on_link))
