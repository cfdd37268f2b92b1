"""What cannot be asked of a model whose parameters rest in the store. Each is refused in one sentence; without, some
would end in an error about meta tensors, and some, as a saved `state_dict()`, in nothing at all."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from spillway.spec.errors import UsageError

_MOVED = (
    "the parameters of this model stream: it cannot be moved or cast (.to, .cuda, .half, ...). Choose the device in "
    "spillway.prepare and the dtype in spillway.load, and move only the batch (for the transformers Trainer there is "
    "spillway.Trainer)"
)
_READ = (
    "the weights of this model rest in the store, its state_dict has none: write them with "
    "spillway.save_pretrained(model, directory), or a point to resume from with spillway.save_point(model)"
)
_WRITTEN = "the weights of this model rest in the store: load others before spillway.prepare"
_COPIED = (
    "a model that streams cannot be copied or pickled: write its weights with "
    "spillway.save_pretrained(model, directory)"
)


class Guarded:
    """Goes before the model's own class."""

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(_MOVED)

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise UsageError(_READ)

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise UsageError(_READ)

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise UsageError(_WRITTEN)

    def resize_token_embeddings(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise UsageError("the embedding of this model rests in the store: resize it before spillway.prepare")

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise UsageError(_COPIED)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise UsageError(_COPIED)


def guard(model: nn.Module, drop_gradients: Callable[[], None]) -> Callable[[], None]:
    """Let the model refuse what it cannot do, and drop its gradients, which are not in its parameters. Returns the way
    back."""
    kind = type(model)
    told: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
    told["zero_grad"] = lambda _, set_to_none=True: drop_gradients()
    model.__class__ = type(kind.__name__, (Guarded, kind), told)

    def undo() -> None:
        model.__class__ = kind

    return undo
