"""`spillway verify`: are the saved points whole, and does streaming compute what plain PyTorch computes?"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from spillway.api import as_dtype, close, load, prepare, read_parameters
from spillway.assembly import prepared
from spillway.checkpoint.saved import SavedPoint
from spillway.data import DataPosition
from spillway.hardware.limits import free_host_bytes
from spillway.integrations.huggingface import CAUSAL_LM, build_resident, find_directory, fitting_length
from spillway.optim.config import AdamW, settings_of
from spillway.optim.update import split_master
from spillway.report.progress import Reporter
from spillway.rows import RowMaker
from spillway.rundir import read_options, where_saved
from spillway.saved_run import open_run
from spillway.spec.errors import DiskError, UsageError, VerificationFailed, required
from spillway.spec.options import TrainOptions
from spillway.spec.sizes import format_size
from spillway.store.manifest import manifest_files

# Relative difference of losses that order of summation alone can make: other loss chunks, other micro-batches.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# Weights, gradients, masters and both moments of plain PyTorch, and as much again to compute in.
_RESIDENT_BYTES = 24


@dataclass(frozen=True, slots=True)
class PointCheck:
    """One saved point; `problem` is empty where every byte is as it was written."""

    step: int
    num_bytes: int
    problem: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Steps with offload beside the same steps of plain PyTorch, wholly in memory."""

    steps: int
    layers: int  # 0: all of them
    losses: list[float]
    resident_losses: list[float]
    largest_loss_difference: float  # relative
    largest_weight_difference: float  # absolute
    largest_weight: float


def verify_points(run: Path, reporter: Reporter) -> list[PointCheck]:
    """Read every saved point and compare it with its checksums. Raises UsageError where there is none."""
    saved = open_run(run)
    total = sum(unit.layout.extent_bytes for unit in saved.units)
    found = [PointCheck(0, 0, text) for text in saved.damaged]
    for manifest in saved.points:
        problem = ""
        with reporter.counting(f"checking step {manifest.step}", total) as counter:
            try:
                with SavedPoint(manifest, saved.units) as point:
                    point.verify(counter.advance)
            except DiskError as error:
                problem = str(error)
        found.append(PointCheck(manifest.step, total, problem))
    return found


def has_points(run: Path) -> bool:
    """Whether the run has saved a step."""
    return bool(manifest_files(where_saved(read_options(run), run)))


def verify_against_resident(run: Path, steps: int, layers: int | None, reporter: Reporter) -> Comparison:
    """Train `steps` steps of the run's model on its data twice: with offload as the run does, and wholly in memory by
    plain PyTorch. `layers`: of the first blocks only; by default as many as memory has room for.

    Raises UsageError where it cannot be done, VerificationFailed where losses differ by more than rounding.
    """
    options = read_options(run)
    directory, dtype = find_directory(options.model), as_dtype(options.dtype)
    layers = _fitting_layers(options, layers, reporter)
    rows = RowMaker.of(directory, fitting_length(directory, options.max_length), options.packing)
    size = options.per_device_train_batch_size * options.gradient_accumulation_steps
    batches = rows.batches(rows.read(options.data).samples, size, options.seed)
    positions = [DataPosition()]
    while len(positions) < steps:
        positions.append(batches.after(positions[-1]))
    data = [batches.at(position) for position in positions]
    with reporter.counting("steps, streamed and resident", 2 * steps) as counter:
        ours, streamed = _streamed(options, layers, data, run, counter.advance)
        theirs, resident = _resident(options, layers, dtype, data, counter.advance)
    loss = _largest(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))
    weight = _largest(float((streamed[name].float() - tensor.float()).abs().max()) for name, tensor in resident.items())
    largest = _largest(float(tensor.float().abs().max()) for tensor in resident.values())
    result = Comparison(steps, layers or 0, ours, theirs, loss, weight, largest)
    if not loss <= _TOLERANCE[dtype]:
        raise VerificationFailed(
            f"losses of {steps} streamed steps differ from plain PyTorch's by up to {loss:.2g} (relative), more than "
            f"rounding explains ({_TOLERANCE[dtype]:.0e}): please report this with {run / 'config.json'}"
        )
    return result


def _largest(values: Iterable[float]) -> float:
    """Of one or more; NaN if one of them is NaN, which `max` may pass over."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def _fitting_layers(options: TrainOptions, layers: int | None, reporter: Reporter) -> int | None:
    """How many blocks plain PyTorch has room for; None for all."""
    model = load(options.model, CAUSAL_LM, as_dtype(options.dtype))
    total = int(getattr(getattr(model, "config", None), "num_hidden_layers", 0))
    if layers is not None:
        if not 0 < layers <= max(total, 1):
            raise UsageError(f"--layers must be between 1 and {total}, not {layers}")
        return layers if layers < total else None
    per_param = _RESIDENT_BYTES
    have, need = 0.6 * free_host_bytes(), per_param * sum(param.numel() for param in model.parameters())
    if need <= have:
        return None
    smaller = load(options.model, CAUSAL_LM, as_dtype(options.dtype), num_layers=1)
    base = per_param * sum(param.numel() for param in smaller.parameters())
    each = (need - base) / max(total - 1, 1)
    fit = 1 + int((have - base) / each) if base <= have else 0
    if fit < 1:
        raise UsageError(
            f"even one block of {options.model} does not fit in memory for plain PyTorch: it takes "
            f"{format_size(base)} and {format_size(have)} may be used"
        )
    reporter.say(f"plain PyTorch has room for {fit} of {total} blocks: comparing those")
    return fit


def _streamed(
    options: TrainOptions, layers: int | None, data: list[dict[str, torch.Tensor]], run: Path, progress: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(options.seed)
    model = load(
        options.model, CAUSAL_LM, as_dtype(options.dtype), allow_pickle=options.allow_pickle, num_layers=layers
    )
    settings = _exact(options)
    with tempfile.TemporaryDirectory(dir=run, prefix="verify-") as store:
        model, optimizer = prepare(
            model, settings, store=store, **replace(options, label_smoothing_factor=0.0).placement()
        )
        try:
            _drop_nothing(model.train())
            device = prepared(model).session.device.torch_device
            losses = []
            for batch in data:
                loss = model(**{key: tensor.to(device) for key, tensor in batch.items()}).loss
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                progress(1)
            return losses, read_parameters(model)
        finally:
            close(model)


def _resident(
    options: TrainOptions, layers: int | None, dtype: torch.dtype, data: list[dict[str, torch.Tensor]], progress: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch: fp32 masters beside 16-bit weights, gradients clipped by their norm, torch.optim.AdamW."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(psutil.cpu_count(logical=False) or torch.get_num_threads())
    model = _drop_nothing(build_resident(find_directory(options.model), CAUSAL_LM, dtype, layers).train())
    params = dict(model.named_parameters())
    masters = {name: nn.Parameter(param.detach().float()) for name, param in params.items()}
    settings = _exact(options)
    groups = [
        {"params": [m for m in masters.values() if m.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [m for m in masters.values() if m.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, settings.lr, settings.betas, settings.eps)
    losses = []
    for batch in data:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        for name, param in params.items():
            masters[name].grad = None if param.grad is None else param.grad.float()
            param.grad = None
        if settings.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), settings.max_grad_norm)
        optimizer.step()
        for name, param in params.items():
            master = masters[name].detach()
            param.data.copy_(split_master(master)[0] if dtype is torch.bfloat16 else master)
        losses.append(float(loss.detach()))
        progress(1)
    return losses, {name: param.detach() for name, param in params.items()}


def _drop_nothing(model: nn.Module) -> nn.Module:
    """Without dropout: the two would draw other masks, and differ by them alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                setattr(module, name, 0.0)
    return model


def _exact(options: TrainOptions) -> AdamW:
    """The run's AdamW. Narrow states have no counterpart in plain PyTorch, so they are compared in their exact form;
    gradients are clipped by their global norm and the loss is not scaled, in both."""
    settings = settings_of(replace(options, optim="adamw", master_bits=32, clip_by="norm", loss_scale="1.0"))
    return required(settings if isinstance(settings, AdamW) else None, "--optim adamw is AdamW")
