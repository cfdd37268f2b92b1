"""`spillway train`: plan, model and data to steps."""

import json
import math
import shutil
import signal
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from spillway import native
from spillway.api import as_dtype, close, load, prepare, save_pretrained
from spillway.assembly import Prepared, persistent_buffers, prepared
from spillway.checkpoint.load import StoreBytes, read_parameter
from spillway.checkpoint.save import save_weights, weights_bytes
from spillway.data import Batches, DataPosition, Encoded, encode_files
from spillway.evaluate import Evaluation
from spillway.hardware.calibration import calibration, note_run
from spillway.hardware.drives import endurance_of
from spillway.hardware.watch import MemoryWatch
from spillway.integrations.huggingface import CAUSAL_LM, find_directory, max_positions
from spillway.integrations.schedules import make_schedule
from spillway.integrations.tokenizer import load_tokenizer, pad_id
from spillway.optim.config import settings_of
from spillway.plan.policies import find_policy
from spillway.plan.simulate import simulate
from spillway.report.chrome import write_chrome_trace
from spillway.report.metrics import MetricsFile, StepMetrics, sum_lanes
from spillway.report.progress import Reporter, StepLine
from spillway.report.tables import RunSummary, print_plan, print_summary
from spillway.rundir import is_free, losses_shown, note_saved, saved_step, store_directories, where_saved
from spillway.spec.errors import BudgetWarning, DiskError, Interrupted, NonFinite, SkippedStep, UsageError
from spillway.spec.jsonable import to_json
from spillway.spec.options import TrainOptions
from spillway.spec.plan import KeepPoints
from spillway.spec.sizes import format_size, parse_size
from spillway.store.disk import free_bytes
from spillway.store.manifest import load_manifest

# A finished run may be given more steps.
_MAY_GROW = ("max_steps", "num_train_epochs")


_MOST_SKIPPED = 5  # batches in a row that are not finite


@dataclass(slots=True)
class _Progress:
    """What the run has done so far."""

    step: int = 0
    position: DataPosition = field(default_factory=DataPosition)
    losses: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)  # of held-out data
    seconds: list[float] = field(default_factory=list)
    skipped: int = 0  # batches that were not finite
    skipped_in_a_row: int = 0
    wary_steps: int = 0  # by the plan's `wary_ops`, since this start of the run
    tokens: int = 0
    written_before: dict[str, int] = field(default_factory=dict)  # bytes to each drive before this start of the run
    last: dict[str, Any] | None = None  # what the saved point that is gone on from knows of its step


def train(options: TrainOptions, reporter: Reporter, origins: dict[str, str] | None = None) -> RunSummary:
    """Run (or go on with) a training. `origins`: where each option's value comes from, for config.json.

    Raises a SpillwayError for anything the user can mend; Interrupted after Ctrl-C, when the last step is committed.
    """
    options.check()
    find_policy(options.policy)
    run = _Run(options, reporter, origins or {})
    with ExitStack() as stack:
        watch = stack.enter_context(MemoryWatch())
        stop = stack.enter_context(_stop_on_signals(reporter))
        stack.callback(run.close)
        run.set_up()
        return run.train(stop, watch)


# Steps, and seconds of each, from which on a run says something about predictions.
_TELLING_STEPS, _TELLING_SECONDS = 3, 0.2


class _Run:
    """One run directory and what happens in it."""

    def __init__(self, options: TrainOptions, reporter: Reporter, origins: dict[str, str]) -> None:
        self._options = options
        self._reporter = reporter
        self._origins = origins
        self._directory = Path(options.output_dir)
        self._output = self._directory / "model"
        self._progress = _Progress()
        self._calibration = 1.0
        self._model: torch.nn.Module | None = None

    # Before the first step #

    def set_up(self) -> None:
        """Everything that can fail early: data, model, plan, memory, disk, the save path."""
        options, say = self._options, self._reporter.say
        if native.load_problem():
            say(f"note: {native.load_problem()}: PyTorch and preadv do its work, slower")
        directory = find_directory(options.model, options.allow_pickle)
        tokenizer = load_tokenizer(directory)
        self._make_directory()
        self._stores = store_directories(options, self._directory)
        self._max_length = self._fitting_length(directory)
        self._encode(tokenizer)
        self._evaluation = self._read_held_out(tokenizer)
        resumed = self._find_resume()
        torch.manual_seed(options.seed)
        say(f"building {directory} and planning")
        model = load(directory, CAUSAL_LM, as_dtype(options.dtype), allow_pickle=options.allow_pickle)
        rows = options.per_device_train_batch_size * options.gradient_accumulation_steps
        self._batches = Batches(
            self._data.samples, rows, self._max_length, options.seed, options.packing, pad_id(tokenizer)
        )
        self._total = self._count_steps()
        self._prepare(model, resumed)
        self._open(resumed)
        if resumed:
            self._resume()
        self._write_plan()
        self._exercise_save()

    def _prepare(self, model: torch.nn.Module, resumed: bool) -> None:
        options, say = self._options, self._reporter.say
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always", BudgetWarning)
            self._model, self._optimizer = prepare(
                model,
                settings_of(options),
                store=self._stores,
                resume=self._saved_in if resumed else False,
                keep=KeepPoints(options.save_total_limit, options.save_total_limit > 0),
                **options.placement(),
            )
        for note in notes:
            if issubclass(note.category, BudgetWarning):
                say(f"note: {note.message}")
        self._parts: Prepared = prepared(model)
        self._parts.points.at_commit = lambda: {"written": json.dumps(self._written())}
        self._parts.points.on_commit = lambda step: note_saved(self._directory, step)
        extra = self._parts.unexpected
        if extra:
            names = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
            say(f"warning: {options.model} has {len(extra)} tensors this model has no use for: {names}")
        model.train()

    def _open(self, resumed: bool) -> None:
        """Plan for the longest batch, take the memory, and bring weights and states to rest."""
        session = self._parts.session
        self._device = session.device.torch_device
        longest = {key: tensor.to(self._device) for key, tensor in self._batches.longest().items()}
        total = self._parts.extent_bytes if resumed else self._parts.weight_bytes
        with self._reporter.counting("checking the saved point" if resumed else "loading weights", total) as counter:
            self._parts.on_load = counter.advance
            session.open((), longest)
        for warning in self._parts.points.warnings:
            self._reporter.say(f"warning: {warning}")

    def _make_directory(self) -> None:
        if not is_free(self._directory):
            raise UsageError(
                f"{self._directory} holds files that are not of a run (a model's config.json?): choose another "
                f"--output-dir"
            )
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / ".writable").write_text("")
            (self._directory / ".writable").unlink()
        except OSError as error:
            raise UsageError(f"the run directory {self._directory} cannot be written: {error.strerror}") from error

    def _encode(self, tokenizer: Any) -> None:
        with self._reporter.counting("reading data") as counter:
            self._data: Encoded = encode_files(self._options.data, tokenizer, self._max_length, counter.reach)
        self._identity = self._describe()
        data = self._data
        self._reporter.say(
            f"data: {data.num_records} records, {len(data.samples)} samples, {data.num_tokens:,} tokens, "
            f"{data.num_trained / data.num_tokens:.0%} trained, {data.num_truncated} cut at {self._max_length}"
            + (f", {data.num_lost} of them with nothing left to train" if data.num_lost else "")
        )
        if data.num_truncated > len(data.samples) / 2:
            self._reporter.say(
                f"warning: more than half of the samples are cut: is --max-length {self._max_length} meant?"
            )

    def _read_held_out(self, tokenizer: Any) -> Evaluation | None:
        options = self._options
        if not options.eval_data:
            return None
        with self._reporter.counting("reading held-out data") as counter:
            found = encode_files(options.eval_data, tokenizer, self._max_length, counter.reach)
        self._reporter.say(f"held-out data: {found.num_records} records, {found.num_trained:,} trained tokens")
        rows, pad = options.per_device_train_batch_size, pad_id(tokenizer)
        return Evaluation.of(found.samples, rows, self._max_length, options.packing, pad)

    def _find_resume(self) -> bool:
        """Whether there is a saved point of this very run. Raises UsageError where it is of another."""
        self._saved_in = where_saved(self._options, self._directory)
        found = load_manifest(self._saved_in)
        if found is None:
            self._refuse_lost_store()
            if self._options.resume_from_checkpoint:
                raise UsageError(f"there is no saved point in {self._stores[0]} to resume from: leave the option out")
            return False
        saved = json.loads(found.run.get("identity", "{}"))
        for name, value in self._identity.items():
            if saved.get(name) == value:
                continue
            if name in _MAY_GROW:
                self._reporter.say(f"note: {name} was {saved.get(name)} and is {value}: the schedule changes from here")
                continue
            raise UsageError(
                f"{self._directory} holds step {found.step} of a run with another {name} "
                f"({_short(saved.get(name))}, now {_short(value)}): give the same one; or start another run, from "
                f"this one's model ({self._output} when it is finished, `spillway export` before)"
            )
        if Path(found.geometry.paths[0]).resolve() != self._stores[0].resolve():
            self._reporter.say(f"the saved point moves from {found.geometry.paths[0]} to {self._stores[0]}")
        return True

    def _refuse_lost_store(self) -> None:
        """Steps were saved and their store is empty: a drive is not mounted, and starting over would bury the run."""
        steps, saved = len(losses_shown(self._directory)), saved_step(self._directory)
        if saved:
            raise DiskError(
                f"{self._directory} had step {saved} saved and {self._stores[0]} holds no saved point: is its drive "
                f"mounted? To start over, remove {self._directory}"
            )
        if steps:
            self._reporter.say(f"warning: the {steps} steps in {self._directory} were never saved: starting over")

    def _describe(self) -> dict[str, Any]:
        """What must not change for a resumed run to be the same run."""
        options = self._options
        names = ("seed", "max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "packing", "dtype",
                 "learning_rate", "num_train_epochs", "max_steps", "max_grad_norm", "clip_by",
                 "loss_scale", "label_smoothing_factor", "optim", "master_bits",
                 "weight_decay", "adam_beta1",
                 "adam_beta2", "adam_epsilon", "warmup_ratio", "lr_scheduler_type")  # fmt: skip
        return {**{name: getattr(options, name) for name in names}, "data": self._data.fingerprint()}

    def _fitting_length(self, directory: Path) -> int:
        """--max-length, or by default what the model has positions for. Raises UsageError for a longer one."""
        asked, most = self._options.max_length, max_positions(directory)
        if most is None or asked <= most:
            return asked
        if self._origins.get("max_length", "default") != "default":
            raise UsageError(f"--max-length {asked} is more than the model's {most} positions")
        self._reporter.say(f"rows are {most} tokens long: the model has no more positions")
        return most

    def _count_steps(self) -> int:
        if self._options.max_steps > 0:
            return self._options.max_steps
        return max(math.ceil(self._options.num_train_epochs * self._batches.per_epoch()), 1)

    def _resume(self) -> None:
        saved = json.loads(self._parts.points.found_run["position"])
        self._progress.step = self._parts.points.step
        self._progress.position = DataPosition(saved["epoch"], saved["index"])
        self._progress.losses = losses_shown(self._directory, self._parts.points.step) or list(saved["losses"])
        self._progress.last = saved["last"]
        self._progress.written_before = json.loads(self._parts.points.found_run["written"])
        self._reporter.say(f"going on after step {self._progress.step} of {self._total}")

    def _write_plan(self) -> None:
        schedule = self._parts.session.engine.schedule
        if schedule is None:
            raise AssertionError("the session is open and has no plan")
        self._plan = schedule.plan
        session, budget = self._parts.session, self._parts.budget
        left = self._total - self._progress.step
        kind = session.device.kind
        self._calibration = calibration(self._stores, kind, self._plan.bottleneck)
        shown = self._plan.calibrated(self._calibration)
        print_plan(self._reporter.console, shown, budget, kind, self._state_bytes(), left)
        engine = session.store.homes.read_engine.backend
        direct = session.store.homes.need_disk().direct
        self._reporter.say(
            f"store {', '.join(map(str, self._stores))} ({engine}{', O_DIRECT' if direct else ', page cache'}) · "
            f"{self._options.optim} {native.kernel_name()}"
        )
        (self._directory / "plan.json").write_text(json.dumps(to_json(self._plan)))
        values = {
            name: {"value": to_json(getattr(self._options, name)), "origin": self._origins.get(name, "default")}
            for name in TrainOptions.__dataclass_fields__
        }
        values["max_length"]["value"] = self._max_length
        values["update"] = {"value": self._plan.placement.update, "origin": self._chosen("update")}
        (self._directory / "config.json").write_text(json.dumps(values, indent=2))

    def _chosen(self, name: str) -> str:
        return "planner" if getattr(self._options, name) == "auto" else self._origins.get(name, "default")

    def _state_bytes(self) -> int:
        return sum(unit.layout.extent_bytes + unit.layout.grad_bytes for unit in self._parts.session.units)

    def _exercise_save(self) -> None:
        """Write, read back and compare a part of the model as it will be written at the end, and see that the rest has
        room. Raises DiskError."""
        session = self._parts.session
        if self._model is None:
            raise AssertionError("the run is not set up")
        need, have = weights_bytes(session.units), free_bytes(self._directory)
        if need > have:
            raise DiskError(
                f"the trained model takes {format_size(need)} in {self._output} and {format_size(have)} are free "
                f"there: free some or choose another --output-dir"
            )
        trial = self._directory / "save-trial"
        index = min(range(len(session.units)), key=lambda unit: session.units[unit].layout.weight_bytes)
        unit = session.units[index]
        source = StoreBytes(session.store)
        names = save_weights(source, session.units, persistent_buffers(self._model), trial, only=index)
        written = load_file(trial / names[0])
        for place in unit.layout.places:
            if not torch.equal(written[place.name], read_parameter(source, index, place, unit.layout)):
                raise DiskError(f"{place.name} came back changed from {trial}: the drive or its file system is faulty")
        shutil.rmtree(trial)

    # The steps #

    def train(self, stop: "_Stop", watch: MemoryWatch) -> RunSummary:
        """All steps that are left, then the final model."""
        options, progress = self._options, self._progress
        schedule = make_schedule(
            options.lr_scheduler_type,
            self._optimizer,
            # A run of a few steps has none to spare for a rate of zero.
            math.ceil(options.warmup_ratio * self._total) if options.warmup_ratio * self._total >= 1 else 0,
            self._total,
            progress.step,
        )
        if progress.step >= self._total and (self._output / "config.json").exists():
            self._reporter.say(
                f"all {progress.step} steps were done before: more --max-steps or epochs go on from there"
            )
            return self._summarize(watch)
        metrics = MetricsFile(self._directory / "metrics.jsonl", progress.step, progress.last)
        try:
            with self._reporter.training(self._total, progress.step) as line:
                while progress.step < self._total:
                    self._refuse_more_writes()
                    self._step(schedule, metrics, line, watch)
                    if stop.asked:
                        self._save_point()
                        raise Interrupted(
                            f"interrupted after step {progress.step} of {self._total}, which is saved: the same "
                            f"command goes on from there"
                            if self._parts.points.are_kept
                            else f"interrupted after step {progress.step} of {self._total}: the model as it is then is "
                            f"in {self._output}; its optimizer states are not saved"
                        )
                    if progress.step % options.save_steps == 0:
                        self._save_point(background=True)
        finally:
            metrics.close()
        self._save_point()
        return self._finish(watch)

    def _step(self, schedule: Any, metrics: MetricsFile, line: StepLine, watch: MemoryWatch) -> None:
        progress, model = self._progress, self._model
        if model is None:
            raise AssertionError("the run is not set up")
        start = time.perf_counter()
        position = progress.position
        batch = {key: tensor.to(self._device) for key, tensor in self._batches.at(position).items()}
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        try:
            value, trained = self._forward_and_update(model, batch, position, learning_rate)
        except SkippedStep as error:
            progress.skipped += 1
            progress.position = self._batches.after(position)
            self._reporter.say(f"warning: batch {position.index} of epoch {position.epoch} is passed over: {error}")
            return
        except NonFinite as error:
            self._pass_over(error, position)
            return
        progress.skipped_in_a_row = 0
        schedule.step()
        progress.step += 1
        seconds = time.perf_counter() - start
        progress.seconds.append(seconds)
        progress.wary_steps += self._optimizer.last_result.wary
        tokens = batch["input_ids"].numel()
        progress.tokens += tokens
        held_out = self._evaluate()
        self._record(metrics, watch, position, value, learning_rate, batch, trained, seconds, held_out)
        line.step(progress.step, value, self._optimizer.last_result.grad_norm, learning_rate, tokens, seconds)

    def _evaluate(self) -> float | None:
        """The held-out loss, where it is time for it."""
        step = self._progress.step
        due = step % self._options.eval_steps == 0 or step == self._total
        if self._evaluation is None or self._model is None or not due:
            return None
        loss = self._evaluation.loss(self._model, self._parts.session)
        self._progress.eval_losses.append(loss)
        self._reporter.say(f"step {step}/{self._total} · held-out loss {loss:.4f}")
        return loss

    def _forward_and_update(
        self, model: torch.nn.Module, batch: dict[str, torch.Tensor], position: DataPosition, learning_rate: float
    ) -> tuple[float, int]:
        """One step; what is saved with it is set before it is committed. Returns the loss and the tokens it is of.
        Raises NonFinite, with the step before it in force."""
        progress, points = self._progress, self._parts.points
        loss = model(**batch).loss
        value, trained = float(loss.detach()), int((batch["labels"] != -100).sum())
        if not math.isfinite(value):
            raise NonFinite(
                f"the loss of step {progress.step + 1} (epoch {position.epoch}, batch {position.index}) is {value}; it "
                f"changed nothing: lower --learning-rate, look at the data, or pass over such batches with "
                f"--non-finite skip"
            )
        last = {"epoch": position.epoch, "loss": value, "learning_rate": learning_rate, "trained_tokens": trained}
        before, after = points.run, self._batches.after(position)
        points.run = self._run_state(after, [*progress.losses[:1], value][:1], last)
        try:
            self._optimizer.scale(loss).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error", SkippedStep)
                self._optimizer.step()
        except (NonFinite, SkippedStep):
            points.run = before
            raise
        progress.losses.append(value)
        progress.position = after
        return value, trained

    def _pass_over(self, error: NonFinite, position: DataPosition) -> None:
        """A batch whose loss or gradients are not finite: stop, saved, or go on with the next, as the user chose."""
        progress, session = self._progress, self._parts.session
        session.settle()
        progress.skipped_in_a_row += 1
        skips = self._options.non_finite == "skip" and session.rest.is_intact
        if skips and progress.skipped_in_a_row < _MOST_SKIPPED:
            progress.skipped += 1
            progress.position = self._batches.after(position)
            self._reporter.say(
                f"warning: batch {position.index} of epoch {position.epoch} is passed over, {progress.skipped} so far: "
                f"{error}"
            )
            return
        if session.rest.is_intact:
            self._save_point()
        if skips:
            raise NonFinite(f"{progress.skipped_in_a_row} batches in a row are not finite: {error}") from error
        raise error

    def _record(
        self,
        metrics: MetricsFile,
        watch: MemoryWatch,
        position: DataPosition,
        loss: float,
        learning_rate: float,
        batch: dict[str, torch.Tensor],
        trained_tokens: int,
        seconds: float,
        held_out: float | None,
    ) -> None:
        result, session = self._optimizer.last_result, self._parts.session
        busy, moved = sum_lanes(result.traces)
        peaks = {
            "device": session.device.peak_bytes(),
            "host": watch.peak,
            "disk": session.store.homes.need_disk().num_bytes,
        }
        metrics.add(
            StepMetrics(
                self._progress.step,
                position.epoch,
                loss,
                result.grad_norm,
                learning_rate,
                batch["input_ids"].numel(),
                trained_tokens,
                seconds,
                busy,
                moved,
                peaks,
                self._written(),
                self._progress.skipped,
                held_out,
            )
        )

    def _written(self) -> dict[str, int]:
        """Bytes written to each drive by this run."""
        before, now = self._progress.written_before, self._parts.session.store.homes.need_disk().written_bytes
        return {path: before.get(path, 0) + now.get(path, 0) for path in {**before, **now}}

    def _refuse_more_writes(self) -> None:
        """Stop, saved, where a drive has been written as much as the user wants it to be."""
        if self._options.max_writes is None:
            return
        limit = parse_size(self._options.max_writes)
        path, written = max(self._written().items(), key=lambda item: item[1])
        if written >= limit:
            self._save_point()
            raise DiskError(
                f"stopped after step {self._progress.step} of {self._total}, which is saved: this run has written "
                f"{format_size(written)} to {path}, all that --max-writes allows; raise it and the same command goes on"
            )

    def _run_state(self, next_batch: DataPosition, first_loss: list[float], last: dict[str, Any]) -> dict[str, str]:
        position = {"epoch": next_batch.epoch, "index": next_batch.index, "losses": first_loss, "last": last}
        return {"position": json.dumps(position), "identity": json.dumps(self._identity)}

    def _save_point(self, background: bool = False) -> None:
        if self._progress.step > 0 and not self._parts.points.are_kept and self._model is not None:
            save_pretrained(self._model, self._output)
        elif self._progress.step > 0:
            self._parts.session.come_to_rest()
            self._parts.points.save(self._parts.session.store, self._progress.step, background)
            if not background:
                self._parts.points.settle(self._parts.session.store)

    # After the last step #

    def _finish(self, watch: MemoryWatch) -> RunSummary:
        if self._model is None:
            raise AssertionError("the run is not set up")
        parts = self._parts
        result = self._optimizer.last_result
        if result is not None:
            names = [unit.name for unit in parts.session.units]
            ops = self._plan.wary_ops if result.wary else self._plan.ops
            predicted = simulate(ops, self._plan.pools, parts.planner.hardware)
            traces = {"measured (last step)": result.traces[-1], "predicted": predicted}
            write_chrome_trace(self._directory / "trace.json", traces, names)
        self._reporter.say(f"writing the model to {self._output}")
        save_pretrained(self._model, self._output)
        return self._summarize(watch)

    def _summarize(self, watch: MemoryWatch) -> RunSummary:
        progress, parts = self._progress, self._parts
        disk = parts.session.store.homes.need_disk()
        later = progress.seconds[1:] or progress.seconds or [0.0]
        peaks = {"device": parts.session.device.peak_bytes(), "host": watch.peak, "disk": disk.num_bytes}
        losses = progress.losses or [math.nan]
        predicted = self._plan.predicted_seconds(wary=2 * progress.wary_steps > len(progress.seconds))
        if len(later) >= _TELLING_STEPS and statistics.median(later) >= _TELLING_SECONDS:
            kind = parts.session.device.kind
            note_run(self._stores, kind, self._plan.bottleneck, predicted, statistics.median(later))
        summary = RunSummary(
            progress.step,
            losses[0],
            losses[-1],
            progress.tokens / sum(progress.seconds) if progress.seconds else 0.0,
            self._calibration * predicted,
            statistics.median(later),
            self._plan.peaks,
            peaks,
            parts.budget,
            self._written(),
            {str(path): warranted for path in self._stores if (warranted := endurance_of(path))},
            str(self._output),
            self._state_bytes(),
            tuple(progress.eval_losses),
        )
        print_summary(self._reporter.console, summary)
        return summary

    def close(self) -> None:
        """Release memory, files and locks."""
        if self._model is not None:
            close(self._model)


@dataclass(slots=True)
class _Stop:
    """Set by the first Ctrl-C or SIGTERM."""

    asked: bool = False


@contextmanager
def _stop_on_signals(reporter: Reporter) -> Iterator[_Stop]:
    """The first signal lets the step in flight finish; the second one ends at once."""
    stop = _Stop()

    def note(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        reporter.say("stopping after the step in flight; once more to stop at once")

    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in asking}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."
