"""What of a model was laid out in the store, and must stay as it was then."""

from collections.abc import Callable

import torch
from torch import nn

from spillway.model.units import Unit
from spillway.spec.errors import UsageError


class LaidOut:
    """The parameters of a model's units, each of which has its `placeholders` in the module tree."""

    def __init__(self, model: nn.Module, units: tuple[Unit, ...], placeholders: dict[str, nn.Parameter]) -> None:
        self._model = model
        self._units = units
        self._placeholders = placeholders
        self._slots = {(id(slot.module), slot.attribute) for unit in units for slot in unit.slots}

    def refuse_changes(self, bound: Callable[[int], torch.Tensor | None]) -> None:
        """Raise UsageError where the user added, froze, freed, replaced or hooked a parameter since: nothing would come
        of it. `bound`: device memory of a unit whose views may stand for its placeholders."""
        self._refuse_added()
        for index, unit in enumerate(self._units):
            self._refuse_replaced(unit, bound(index))
            for place in unit.layout.places:
                if self._placeholders[place.name].requires_grad != place.trainable:
                    raise UsageError(
                        f"requires_grad of {place.name} was changed after prepare, which has laid out what is trained: "
                        f"change it before"
                    )

    def _refuse_added(self) -> None:
        for path, module in self._model.named_modules():
            for name, param in module._parameters.items():
                if param is not None and (id(module), name) not in self._slots:
                    raise UsageError(
                        f"{path}{'.' if path else ''}{name} came into the model after prepare, which has laid out what "
                        f"is trained: add it before"
                    )

    def _refuse_replaced(self, unit: Unit, bound: torch.Tensor | None) -> None:
        for slot in unit.slots:
            known, found = self._placeholders[slot.name], slot.module._parameters.get(slot.attribute)
            if found is not known and not _is_view_of(found, bound):
                raise UsageError(
                    f"{slot.name} was replaced by another parameter after prepare, which has laid out what is "
                    f"trained: change it before"
                )
            if known._backward_hooks or known._post_accumulate_grad_hooks:
                raise UsageError(
                    f"{slot.name} was given a hook on its gradient after prepare, which would not be called: "
                    f"gradients of a model that streams are summed unit by unit"
                )


def _is_view_of(found: torch.Tensor | None, memory: torch.Tensor | None) -> bool:
    if found is None or memory is None:
        return False
    return found.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
