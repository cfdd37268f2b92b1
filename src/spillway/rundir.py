"""What a run directory says about its run, without a look at its model."""

import hashlib
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from spillway.durable import write_number, write_whole
from spillway.report.metrics import read_metrics
from spillway.spec.errors import DiskError, UsageError
from spillway.spec.options import TrainOptions
from spillway.store.manifest import manifest_files

METRICS = "metrics.jsonl"
SAVED_STEP = "saved-step"
_STORES = "stores.json"
_WRITTEN_STEP = "model-step"
_WRITTEN_BYTES = "written.json"


def read_options(run: Path) -> TrainOptions:
    """The options a run was last started with. Raises UsageError where the directory is no run."""
    path = run / "config.json"
    try:
        values: dict[str, Any] = {name: entry["value"] for name, entry in json.loads(path.read_text()).items()}
    except FileNotFoundError as error:
        raise UsageError(f"{run} is not a run directory: it has no config.json") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not of a run: choose another directory") from error
    known = {field.name for field in fields(TrainOptions)}
    kept: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in known
    }
    if "output_dir" not in kept:
        raise UsageError(f"{path} is not of a run: choose another directory")
    return TrainOptions(**kept)


def with_whole_paths(options: TrainOptions) -> TrainOptions:
    """The options as a run remembers them: paths say the same from every directory. Names of a hub stay as they are."""
    whole = os.path.abspath
    return replace(
        options,
        model=whole(options.model) if os.path.exists(options.model) else options.model,
        data=tuple(map(whole, options.data)),
        eval_data=tuple(map(whole, options.eval_data)),
        output_dir=whole(options.output_dir),
        store=tuple(map(whole, options.store)),
    )


def read_plan(run: Path) -> dict[str, Any]:
    """The plan.json of a run as it stands there. Raises UsageError where there is none that can be read."""
    path = run / "plan.json"
    try:
        plan: dict[str, Any] = json.loads(path.read_text())
        return plan
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}): the run has not begun to train") from error


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step a run has made. Raises UsageError where it has made none."""
    rows = read_metrics(run / METRICS)
    if not rows:
        raise UsageError(f"{run} has made no step yet: {run / METRICS} is empty or not there")
    return rows


def is_run(directory: Path) -> bool:
    """Whether it is a run's."""
    try:
        read_options(directory)
    except UsageError:
        return False
    return True


def is_free(run: Path) -> bool:
    """Whether a run may use the directory: new, or a run's already."""
    if not (run / "config.json").exists():
        return not (run / METRICS).exists() and not any(run.glob("*.safetensors"))
    return is_run(run)


def note_saved(run: Path, step: int) -> None:
    """Remember in the run directory that a saved point was made, wherever its store is."""
    write_number(run / SAVED_STEP, step)


def saved_step(run: Path) -> int:
    """The last step that was saved; 0 for none."""
    return _step_in(run / SAVED_STEP)


def note_written(run: Path, step: int) -> None:
    """Remember that the trained model is whole, and of which step."""
    write_number(run / _WRITTEN_STEP, step)


def written_step(run: Path) -> int:
    """The step of the trained model that was written last; 0 for none, or where it is not there any more."""
    is_there = (model_in(run) / "config.json").exists() and any(model_in(run).glob("*.safetensors"))
    return _step_in(run / _WRITTEN_STEP) if is_there else 0


def note_written_bytes(run: Path, written: dict[str, int]) -> None:
    """Remember what the run has written in all, by path; a saved point does not know of what comes after it."""
    write_whole(run / _WRITTEN_BYTES, json.dumps({"run": str(run.resolve()), "written": written}))


def written_bytes(run: Path) -> dict[str, int]:
    """What was noted last; nothing before. The run may have been renamed since."""
    try:
        found = json.loads((run / _WRITTEN_BYTES).read_text())
        names = {found["run"]: str(run.resolve())}
        return {names.get(path, path): int(count) for path, count in found["written"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def refuse_lost_store(run: Path, store: Path) -> None:
    """Raise DiskError where steps were saved and their store is empty: a drive is not mounted, perhaps."""
    if saved := saved_step(run):
        raise DiskError(
            f"{run} had step {saved} saved and {store} holds no saved point: is its drive mounted? To start over, "
            f"remove {run}"
        )


def model_in(run: Path) -> Path:
    """Where the trained model goes."""
    return run / "model"


def _step_in(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def losses_shown(run: Path, last_step: int | None = None) -> list[float]:
    """The loss of every step in the metrics of a run, up to `last_step`."""
    return [row["loss"] for row in read_metrics(run / METRICS) if last_step is None or row["step"] <= last_step]


def held_out_losses_shown(run: Path, last_step: int) -> list[float]:
    """Every loss of held-out data in the metrics of a run, up to `last_step`."""
    found = [row.get("eval_loss") for row in read_metrics(run / METRICS) if row["step"] <= last_step]
    return [loss for loss in found if loss is not None]


def store_directories(options: TrainOptions, run: Path) -> tuple[Path, ...]:
    """One directory for this run under every --store path; without any, those of last time, or inside the run."""
    known = stores_of_last_time(run)
    if known and not options.store:
        return known
    if not options.store and (run / "config.json").exists():
        options = replace(options, store=read_options(run).store)
    if not options.store:
        return (run.resolve() / "store",)
    roots = [Path(path).resolve() for path in with_whole_paths(options).store]
    if known and [path.parent for path in known] == roots:
        return known
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
    return tuple(path / f"spillway-{run.name}-{digest}" for path in roots)


def remember_stores(run: Path, stores: tuple[Path, ...]) -> None:
    """Where the store of a run is: its name comes from the run's, which may change."""
    write_whole(run / _STORES, json.dumps({"run": str(run.resolve()), "stores": list(map(str, stores))}))


def stores_of_last_time(run: Path) -> tuple[Path, ...]:
    """The store paths that a start of the run has noted last, also of a run that was moved, with them or without; none
    for a new one and for a copy of one that is still there."""
    try:
        found = json.loads((run / _STORES).read_text())
        was, stores = Path(found["run"]), tuple(map(Path, found["stores"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    if was != run.resolve() and was.exists():
        return ()
    return tuple(run.resolve() / path.relative_to(was) if path.is_relative_to(was) else path for path in stores)


def where_saved(options: TrainOptions, run: Path) -> Path:
    """The directory with the saved points: under the first store path of now or of last time, or in the run."""
    candidates = [*store_directories(options, run)]
    if (run / "config.json").exists():
        candidates += store_directories(read_options(run), run)
    candidates += [*stores_of_last_time(run), run.resolve() / "store"]
    return next((path for path in candidates if manifest_files(path)), candidates[0])
