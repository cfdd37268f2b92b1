"""Whether a saved point is of this very run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spillway.checkpoint.save import finish_save
from spillway.data import Encoded
from spillway.report.progress import Reporter
from spillway.rundir import SAVED_STEP, losses_shown, model_in, refuse_lost_store, saved_step
from spillway.spec.errors import DiskError, UsageError
from spillway.spec.options import TrainOptions
from spillway.store.manifest import load_manifest, load_manifests

_MUST_MATCH = (
    "seed", "max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "packing", "dtype",
    "learning_rate", "num_train_epochs", "max_steps", "max_grad_norm", "clip_by", "loss_scale",
    "label_smoothing_factor", "optim", "master_bits", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "warmup_ratio", "lr_scheduler_type",
)  # fmt: skip
# A finished run may be given more steps.
_MAY_GROW = ("max_steps", "num_train_epochs")


def identity_of(options: TrainOptions, tokenizer: dict[str, str], data: Encoded) -> dict[str, Any]:
    """What must not change for a resumed run to be the same run. `tokenizer`: fingerprints of its parts."""
    given = {name: getattr(options, name) for name in _MUST_MATCH}
    return {**given, "tokenizer": tokenizer, "data": data.fingerprint()}


def is_resumed(
    identity: dict[str, Any],
    options: TrainOptions,
    directory: Path,
    stores: tuple[Path, ...],
    saved_in: Path,
    reporter: Reporter,
    changed_data: Callable[[], str],
) -> bool:
    """Whether `saved_in` holds a saved point of this run. `changed_data`: says what differs in the data. Raises
    UsageError where it is of another, or was asked for and is not there; DiskError where it was there and its drive is
    not."""
    found = load_manifest(saved_in)
    if found is None:
        _refuse_lost_store(directory, stores[0], reporter)
        if options.resume_from_checkpoint:
            raise UsageError(f"there is no saved point in {stores[0]} to resume from: leave the option out")
        return False
    if found.step < saved_step(directory) and not load_manifests(saved_in)[1]:
        raise DiskError(
            f"{directory} had step {saved_step(directory)} saved and {saved_in} holds step {found.step}, of before the "
            f"run moved: give the --store it moved to, or, to go on from step {found.step}, remove "
            f"{directory / SAVED_STEP}"
        )
    saved = json.loads(found.run.get("identity", "{}"))
    for name, value in identity.items():
        if saved.get(name) == value or (name == "tokenizer" and name not in saved):  # of an earlier release
            continue
        if name in _MAY_GROW:
            reporter.say(f"note: {name} was {saved.get(name)} and is {value}: the schedule changes from here")
            continue
        difference = f"{_short(saved.get(name))}, now {_short(value)}"
        if name == "tokenizer":
            parts = [part for part in value if saved[name].get(part) != value[part]]
            difference = f"its {' and its '.join(parts)} changed"
        if name == "data":
            difference = changed_data() or difference
        raise UsageError(
            f"{directory} holds step {found.step} of a run with {_another(name)} ({difference}): give the same; or "
            f"start another run, from this one's model ({directory / 'model'} when it is finished, `spillway export` "
            f"before)"
        )
    return True


def _refuse_lost_store(directory: Path, store: Path, reporter: Reporter) -> None:
    """Steps were saved and their store is empty: a drive is not mounted, and starting over would bury the run."""
    refuse_lost_store(directory, store)
    steps = len(losses_shown(directory))
    finish_save(model_in(directory))
    if steps and (model_in(directory) / "config.json").exists():
        raise UsageError(
            f"{model_in(directory)} is the result of {steps} steps whose optimizer states were not saved (there was no "
            f"room for them, or it ended amid a step made in place), so it cannot be resumed: to start over choose "
            f"another --output-dir, or remove this one"
        )
    if steps:
        reporter.say(f"warning: the {steps} steps in {directory} were never saved: starting over")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."


def _another(name: str) -> str:
    return "other data" if name == "data" else f"another {name}"
