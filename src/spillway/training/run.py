"""The steps of a run, and what happens between them."""

import json
import math
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch

from spillway.api import save_pretrained
from spillway.assembly import write_point
from spillway.data import DataPosition
from spillway.data.batches import IGNORED
from spillway.hardware.watch import MemoryWatch
from spillway.integrations.schedules import make_schedule
from spillway.optim.config import settings_of
from spillway.plan.policies import find_policy
from spillway.report.metrics import MetricsFile
from spillway.report.progress import Reporter, StepLine
from spillway.report.tables import RunSummary
from spillway.rundir import METRICS, note_written, written_step
from spillway.spec.errors import DiskError, Interrupted, NonFinite, SkippedStep
from spillway.spec.options import TrainOptions
from spillway.spec.sizes import counted, format_size, parse_size
from spillway.training.progress import Progress
from spillway.training.setup import Training, set_up
from spillway.training.signals import Stop, stop_on_signals
from spillway.training.telling import Telling

_MOST_SKIPPED = 5  # batches in a row that are not finite
_NAMED = 4  # records of a batch that a message names


def train(
    options: TrainOptions,
    reporter: Reporter,
    origins: dict[str, str] | None = None,
    at_once: Callable[[], None] | None = None,
) -> RunSummary:
    """Run (or go on with) a training. `origins`: where each option's value comes from, for config.json. `at_once`: what
    ends a step that is not waited for.

    Raises a SpillwayError for anything the user can mend; Interrupted after Ctrl-C, when the last step is committed.
    """
    options.check()
    find_policy(options.policy)
    settings_of(options)  # said before data is read
    with ExitStack() as stack:
        watch = stack.enter_context(MemoryWatch("load"))
        stop = stack.enter_context(stop_on_signals(at_once))
        training = set_up(options, origins or {}, reporter, stack)
        progress = Progress()
        if training.is_resumed:
            progress = Progress.of(training.parts.points, training.directory)
            if progress.step < training.total:
                reporter.say(f"going on after step {progress.step} of {training.total}")
        telling = Telling(training, progress, reporter, watch)
        telling.tell_plan()
        with watch.phase("step"):
            return _Run(training, progress, telling, reporter, watch).train(stop)


class _Run:
    """From the first step that is left to the final model."""

    def __init__(
        self, training: Training, progress: Progress, telling: Telling, reporter: Reporter, watch: MemoryWatch
    ) -> None:
        self._watch = watch
        self._training = training
        self._options = training.options
        self._progress = progress
        self._telling = telling
        self._reporter = reporter
        self._points = training.parts.points
        self._points.at_commit = lambda: {"written": json.dumps(telling.written())}
        self._schedule = self._make_schedule()

    def _make_schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        warmup = self._options.warmup_ratio * self._training.total
        return make_schedule(
            self._options.lr_scheduler_type,
            self._training.optimizer,
            math.ceil(warmup) if warmup >= 1 else 0,  # a run of a few steps has none to spare for a rate of zero
            self._training.total,
            self._progress.step,
        )

    def train(self, stop: Stop) -> RunSummary:
        """All steps that are left, then the final model."""
        training, progress = self._training, self._progress
        if progress.step >= training.total:
            self._reporter.say(
                f"{counted(progress.step, 'step')} made before and {training.total} are asked for: more --max-steps or "
                f"epochs go on from there"
            )
            if written_step(training.directory) == progress.step:
                return self._telling.summarize()
        metrics = MetricsFile(training.directory / METRICS, progress.step, progress.last)
        stop.waits = True
        try:
            with self._reporter.training(training.total, progress.step) as line:
                while progress.step < training.total and not self._has_written_enough():
                    before = progress.step
                    self._step(metrics, line)
                    if stop.asked:
                        break
                    if progress.step > before and progress.step % self._options.save_steps == 0:
                        self._save_behind()
        except NonFinite:
            if training.session.rest.is_intact:
                self._save()
            raise
        except Exception as error:
            self._save_before_failing(error)
            raise
        finally:
            metrics.close()
        if self._can_save or stop.asked or progress.step < training.total:
            self._save()
        if stop.asked:
            raise self._interrupted()
        if progress.step < training.total:
            raise self._written_enough()
        stop.waits = False  # what follows can be done again
        self._reporter.say(f"writing the model to {training.output}")
        try:
            with self._watch.phase("save"):
                save_pretrained(training.model, training.output)
        except DiskError as error:
            then = "; the last step is saved, and the same command writes the model" if self._can_save else ""
            raise DiskError(f"{error}{then}") from error
        self._telling.note_model()
        note_written(training.directory, progress.step)
        self._telling.write_trace()
        return self._telling.summarize()

    def _interrupted(self) -> Interrupted:
        where = f"interrupted after step {self._progress.step} of {self._training.total}"
        if self._can_save and self._progress.step:
            return Interrupted(f"{where}, which is saved: the same command goes on from there")
        if not self._progress.step:
            return Interrupted(f"{where}: there is nothing to save yet")
        return Interrupted(
            f"{where}: the model as it is then is in {self._training.output}; its optimizer states are not saved"
        )

    # One step #

    def _step(self, metrics: MetricsFile, line: StepLine) -> None:
        training, progress = self._training, self._progress
        start, position = time.perf_counter(), progress.position
        device = training.session.device.torch_device
        batch = {key: tensor.to(device) for key, tensor in training.batches.at(position).items()}
        learning_rate = float(training.optimizer.param_groups[0]["lr"])
        try:
            value, trained = self._forward_and_update(batch, position, learning_rate)
        except SkippedStep as error:
            progress.skip(training.batches.after(position))
            self._reporter.say(f"warning: {self._batch(position)} was skipped: {error}")
            return
        except NonFinite as error:
            self._pass_over(error, position)
            return
        progress.skipped_in_a_row = 0
        self._schedule.step()
        progress.step += 1
        seconds = time.perf_counter() - start
        progress.seconds.append(seconds)
        progress.wary_steps += training.optimizer.last_result.wary
        tokens = training.batches.num_tokens(position)
        progress.tokens += tokens
        self._telling.look()
        held_out = self._evaluate()
        self._telling.tell_step(metrics, position, value, learning_rate, tokens, trained, seconds, held_out)
        line.step(progress.step, value, training.optimizer.last_result.grad_norm, learning_rate, tokens, seconds)

    def _forward_and_update(
        self, batch: dict[str, torch.Tensor], position: DataPosition, learning_rate: float
    ) -> tuple[float, int]:
        """One step; what is saved with it is set before it is committed. Returns the loss and the tokens it is of.
        Raises NonFinite, with the step before it in force."""
        training, progress, points = self._training, self._progress, self._points
        loss = training.model(**batch).loss
        value, trained = float(loss.detach()), int((batch["labels"] != IGNORED).sum())
        if not math.isfinite(value):
            # Under a dynamic scale the step is dropped, as PyTorch's GradScaler does it, but not for ever: no scale
            # mends a loss.
            if training.optimizer.loss_scale.at_floor or progress.skipped_in_a_row + 1 >= _MOST_SKIPPED:
                raise NonFinite(
                    f"the loss of step {progress.step + 1} is {value}; it changed nothing: lower --learning-rate, look "
                    f"at the data, or pass over such batches with --non-finite skip"
                )
            progress.skipped_in_a_row += 1
        last = {"epoch": position.epoch, "loss": value, "learning_rate": learning_rate, "trained_tokens": trained}
        before, after = points.run, training.batches.after(position)
        points.run = {
            "position": progress.saved_with(after, value, last),
            "identity": json.dumps(training.identity),
        }
        try:
            training.optimizer.scale(loss).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error", SkippedStep)
                training.optimizer.step()
        except BaseException:
            if training.optimizer.num_steps == progress.step:  # it was not made
                points.run = before
            raise
        progress.losses.append(value)
        progress.position = after
        return value, trained

    def _pass_over(self, error: NonFinite, position: DataPosition) -> None:
        """A batch whose loss or gradients are not finite: stop, saved, or go on with the next, as the user chose."""
        progress, session = self._progress, self._training.session
        session.settle()
        progress.skipped_in_a_row += 1
        skips = self._options.non_finite == "skip" and session.rest.is_intact
        batch = f"step {progress.step + 1}, {self._batch(position)}"
        if skips and progress.skipped_in_a_row < _MOST_SKIPPED:
            progress.skip(self._training.batches.after(position))
            self._reporter.say(f"warning: {batch} was skipped, {progress.skipped} so far: {error}")
            return
        if skips:
            raise NonFinite(
                f"{progress.skipped_in_a_row} batches in a row are not finite; the last is {batch}: {error}"
            ) from error
        raise NonFinite(f"{batch}: {error}") from error

    def _batch(self, position: DataPosition) -> str:
        """Which batch it is, and of which samples, for a person."""
        sources = self._training.batches.sources(position)
        more = f" and {len(sources) - _NAMED} more" if len(sources) > _NAMED else ""
        return f"batch {position.index} of epoch {position.epoch} ({', '.join(sources[:_NAMED])}{more})"

    # Between steps #

    def _evaluate(self) -> float | None:
        """The held-out loss, where it is time for it."""
        training, step = self._training, self._progress.step
        due = step % self._options.eval_steps == 0 or step == training.total
        if training.evaluation is None or not due:
            return None
        with self._watch.phase("evaluation"):
            loss = training.evaluation.loss(training.model, training.session)
        self._progress.eval_losses.append(loss)
        self._reporter.say(f"step {step}/{training.total} · held-out loss {loss:.4f}")
        return loss

    def _has_written_enough(self) -> bool:
        """Whether a drive has been written as much as the user wants it to be."""
        most = self._options.max_writes
        return most is not None and max(self._telling.written_to_drives().values()) >= parse_size(most)

    def _written_enough(self) -> DiskError:
        paths, written = max(self._telling.written_to_drives().items(), key=lambda item: item[1])
        where = f"stopped after step {self._progress.step} of {self._training.total}"
        why = f"this run has written {format_size(written)} to {paths}, all that --max-writes allows"
        if self._can_save:
            return DiskError(f"{where}, which is saved: {why}; raise it and the same command goes on")
        return DiskError(
            f"{where}: {why}; the model as it is then is in {self._training.output}, its optimizer states are not saved"
        )

    # What is kept #

    @property
    def _can_save(self) -> bool:
        """Whether the end of a step can be a saved point, if only until the next one begins."""
        return self._points.can_save(self._training.session.store)

    def _save_behind(self) -> None:
        """A saved point of this step, written while the next one runs."""
        if self._points.are_kept:
            self._training.session.come_to_rest()
            self._points.save_behind(self._training.session.store, self._progress.step)
            return
        try:
            self._save_model()
        except DiskError as error:  # it is the last thing to lose a run for
            self._reporter.say(f"warning: {error}; training goes on")

    def _save(self) -> None:
        if self._progress.step == 0:
            return
        if not self._can_save:
            self._save_model()
            return
        with self._watch.phase("save"):
            self._training.session.come_to_rest()
            write_point(self._training.parts, self._progress.step)

    def _save_before_failing(self, error: Exception) -> None:
        """The last step of a run that an error ends, if it is whole and can be saved: the error is what the user is to
        hear of. A model is not written where a drive fails: the one written before may be all that there is."""
        training = self._training
        with suppress(Exception):
            training.session.settle()
        is_made = training.optimizer.num_steps == self._progress.step
        if is_made and training.session.rest.is_intact and (self._can_save or not isinstance(error, DiskError)):
            with suppress(Exception):
                self._save()
        if self._progress.step and self._points.saved_step == self._progress.step:
            self._reporter.say(f"step {self._progress.step} is saved: the same command goes on from there")

    def _save_model(self) -> None:
        with self._watch.phase("save"):
            save_pretrained(self._training.model, self._training.output, progress=False)  # beside the bar of steps
        self._telling.note_model()
