"""What the planner needs to know of a model, before there are any weights."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from spillway.assembly import adapt_parts
from spillway.model.profile import CallRecord, shapes_of, with_form
from spillway.model.units import find_units
from spillway.runtime.device import CpuDevice
from spillway.runtime.forwards import Batch
from spillway.runtime.session import Session
from spillway.spec.defaults import nothing
from spillway.spec.errors import InvariantError, UsageError
from spillway.spec.hardware import Budget
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan
from spillway.spec.state import EXACT, StateFormat
from spillway.store.placed import PlacedStore


@dataclass(slots=True)
class _Observed:
    """The calls of a forward on a batch; and on one with a row more, once that was asked for."""

    calls: list[CallRecord]
    calls_beside: bool
    grown: list[CallRecord] | None = None


class ModelProfiler:
    """Profiles a model on the meta device by forwards on fake tensors. The model serves for nothing else afterwards."""

    def __init__(self, model: nn.Module, kind: str = "cpu") -> None:
        """`kind`: of the device that will compute."""
        self._name = type(model).__name__
        self._units = find_units(model)
        layouts = [unit.layout for unit in self._units]
        store = PlacedStore(layouts, None, Budget(0, 0, 0, 0), lambda size: torch.empty(0), lambda _: nothing, ())
        session = Session(model, self._units, CpuDevice(kind), _no_plan, store, 1, None, 1)
        adapt_parts(model, session)
        session.engine.close()
        self._forwards = session.forwards
        self._observed: dict[Hashable, _Observed] = {}

    def of(self, batch: Mapping[str, Any], micro_batch: int | None = None, form: StateFormat = EXACT) -> ModelProfile:
        """Of a batch in the place of this one (keyword arguments of the forward), micro-batches of so many rows and
        what an optimizer keeps. Forwards that were made for other cuts and optimizers serve again. Raises
        UsageError."""
        asked = self._forwards.batch((), dict(batch))
        is_cut = micro_batch is not None and micro_batch < asked.rows
        try:
            found = self._observe(asked, is_cut)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the forward of {self._name} depends on the values of its tensors ({error}), so what it takes shows "
                f"only when it is trained: prepare the model, whose first forward plans"
            ) from error
        shapes = shapes_of(found.calls, found.grown if is_cut else None, asked.rows, micro_batch)
        profile = replace(self._forwards.profile(asked, found.calls, shapes), calls_beside=found.calls_beside)
        return with_form(profile, self._units, form)

    def _observe(self, batch: Batch, is_cut: bool) -> _Observed:
        found = self._observed.get(batch.key)
        if found is None:
            found = self._observed[batch.key] = _Observed(self._forwards.fake(batch), self._forwards.calls_beside)
        if is_cut and found.grown is None:
            found.grown = self._forwards.grown(batch)
        return found


def _no_plan(profile: ModelProfile, is_open: bool) -> Plan:
    raise InvariantError("a model that is only profiled was to be planned")
