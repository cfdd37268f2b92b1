"""`spillway export`: a saved point to a model directory, without loading the model."""

from dataclasses import dataclass
from pathlib import Path

from spillway.api import as_dtype
from spillway.checkpoint.points import from_text
from spillway.checkpoint.save import refuse_full, save_weights, weights_bytes
from spillway.checkpoint.saved import SavedPoint
from spillway.checkpoint.sources import persistent_buffers
from spillway.integrations.huggingface import find_directory, save_config
from spillway.origins import loaded_in, open_directory
from spillway.report.progress import Reporter
from spillway.rundir import is_run
from spillway.saved_run import SavedRun, open_run
from spillway.spec.errors import UsageError
from spillway.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What was written where."""

    step: int
    output: str
    dtype: str
    num_bytes: int


def export(
    run: Path, output: Path, dtype: str | None, step: int | None, reporter: Reporter, overwrite: bool = False
) -> ExportSummary:
    """Write a saved point (the newest, or that of `step`) as a Hugging Face directory with config and tokenizer.
    `dtype`: bfloat16, float16 or float32; by default what the run computes in. What is written is checked first.
    `overwrite`: also where a model is, but for the one that the run started from.

    Raises UsageError for a wrong choice, DiskError for damage or want of room.
    """
    wanted = as_dtype(dtype) if dtype else None
    saved = open_run(run)
    _refuse_used(output, find_directory(saved.options.model), overwrite)
    manifest = _choose(saved, step)
    need = weights_bytes(saved.units, wanted)
    refuse_full(output, need, "directory")
    source = open_directory(saved.model, loaded_in(saved.model)[saved.model])
    source.close()
    for name, buffer in (buffers := persistent_buffers(saved.model)).items():  # after those of the files
        if name in manifest.buffers:
            buffer.copy_(from_text(manifest.buffers[name], buffer.dtype, buffer.shape))
    is_as_trained = wanted in (None, as_dtype(saved.options.dtype))  # otherwise it is made from the masters
    arrays = ("weight",) if is_as_trained else ("weight", "low", "master")
    read = sum(part.num_bytes for unit in saved.units for part in unit.layout.components if part.name in arrays)
    with SavedPoint(manifest, saved.units) as point:
        with reporter.counting(f"checking step {manifest.step}", read) as counter:
            point.verify(counter.advance, arrays)
        with reporter.counting(f"writing {output}", need) as counter:
            save_weights(
                point,
                saved.units,
                buffers,
                output,
                dtype=wanted,
                progress=counter.advance,
                written_as=source.written_as,
            )
    save_config(saved.model, output, find_directory(saved.options.model), wanted)
    return ExportSummary(manifest.step, str(output), dtype or saved.options.dtype, need)


def _refuse_used(output: Path, source: Path, overwrite: bool) -> None:
    """Raise UsageError where something would be lost: a run, the model this one started from, or another model."""
    if is_run(output):
        raise UsageError(f"{output} is a run: choose another directory")
    if output.resolve() == source.resolve():
        raise UsageError(f"{output} is the model that the run started from: choose another directory")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file: choose a directory")
    if (output / "config.json").exists() and not overwrite:
        raise UsageError(f"{output} holds a model: choose another directory, or give --overwrite")


def _choose(saved: SavedRun, step: int | None) -> Manifest:
    if step is None:
        return saved.points[0]
    for point in saved.points:
        if point.step == step:
            return point
    known = ", ".join(str(point.step) for point in saved.points)
    raise UsageError(f"step {step} is not saved: there is {known} (--save-total-limit keeps more)")
