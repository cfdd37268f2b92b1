"""What a run says: its plan before the first step, a line of metrics for each, predicted beside measured at the end."""

import json
import math
import os
import statistics
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from spillway import native
from spillway.checkpoint.save import weights_bytes
from spillway.data import DataPosition
from spillway.durable import write_whole
from spillway.hardware.calibration import host_extra, is_doubtful, note_host_peak, note_rates
from spillway.hardware.drives import endurance_of
from spillway.hardware.probe import forget
from spillway.hardware.watch import MemoryWatch
from spillway.plan.refine import RATES, refined
from spillway.plan.simulate import simulate, step_seconds
from spillway.report.chrome import write_chrome_trace
from spillway.report.metrics import MetricsFile, StepMetrics, sum_lanes
from spillway.report.progress import Reporter
from spillway.report.tables import RunSummary, print_plan, print_summary
from spillway.rundir import METRICS, note_written_bytes, with_whole_paths
from spillway.spec.hardware import HardwareSpec
from spillway.spec.jsonable import to_json
from spillway.spec.options import TrainOptions
from spillway.spec.plan import Op, Pool
from spillway.spec.sizes import format_seconds
from spillway.spec.trace import Trace
from spillway.training.progress import Progress
from spillway.training.setup import Training

# Steps, and seconds of each, from which on a run says something about predictions.
_TELLING_STEPS, _TELLING_SECONDS = 3, 0.2
# The first step of a start finds nothing due and everything cold, the second writes where nothing was written before.
_LOOKED_AT = 3
_TELLING = 5  # steps that are kept of those: of them the one in the middle tells most
# Rates and times that are off by less are not worth a line.
_WORTH_TELLING = 0.15


class Telling:
    """Of one run."""

    def __init__(self, training: Training, progress: Progress, reporter: Reporter, watch: MemoryWatch) -> None:
        self._training = training
        self._progress = progress
        self._reporter = reporter
        self._watch = watch
        self._planner = training.parts.planner
        self._kind = training.session.device.kind
        self._models: Counter[str] = Counter()  # bytes, by run directory
        self._refined_step = 0.0  # seconds, with the rates of the first steps
        self._telling_steps: deque[tuple[tuple[Op, ...], tuple[Pool, ...], Trace]] = deque(maxlen=_TELLING)
        self._told_full = False  # that metrics.jsonl finds no room
        peaks = training.plan.peaks
        # The plan's peak is a promise; this is what runs here take of it.
        self._expected_peaks = replace(peaks, host=max(peaks.host + host_extra(training.stores, self._kind), 0))

    def tell_plan(self) -> None:
        """Print it and write plan.json and config.json."""
        training, reporter, plan = self._training, self._reporter, self._training.plan
        left = max(training.total - self._progress.step, 0)
        print_plan(reporter.console, plan, training.parts.budget, self._kind, training.state_bytes, left)
        homes = training.session.store.homes
        how = "O_DIRECT" if homes.need_disk().direct else "page cache"
        stores = ", ".join(map(str, training.stores))
        reporter.say(
            f"store {stores} ({homes.read_engine.backend}, {how}) · {training.options.optim} {native.kernel_name()}"
        )
        if left:  # or the plan of steps that were made would be lost
            write_whole(training.directory / "plan.json", json.dumps(to_json(plan)))
        options, origins = with_whole_paths(training.options), training.origins
        values = {
            name: {"value": to_json(getattr(options, name)), "origin": origins.get(name, "default")}
            for name in TrainOptions.__dataclass_fields__
        }
        values["max_length"]["value"] = training.max_length
        chosen = "planner" if options.update == "auto" else origins.get("update", "default")
        values["update"] = {"value": plan.placement.update, "origin": chosen}
        write_whole(training.directory / "config.json", json.dumps(values, indent=2))

    def tell_step(
        self,
        metrics: MetricsFile,
        position: DataPosition,
        loss: float,
        learning_rate: float,
        tokens: int,
        trained_tokens: int,
        seconds: float,
        held_out: float | None,
    ) -> None:
        """Add the line of the step that has just ended."""
        result = self._training.optimizer.last_result
        busy, moved = sum_lanes(result.traces)
        problem = metrics.add(
            StepMetrics(
                self._progress.step,
                position.epoch,
                loss,
                result.grad_norm,
                learning_rate,
                tokens,
                trained_tokens,
                seconds,
                busy,
                moved,
                self._peaks(),
                self.written(),
                self._progress.skipped,
                held_out,
                self._training.total,
            )
        )
        if problem is not None and not self._told_full:
            file = self._training.directory / METRICS
            self._reporter.say(f"warning: {file} cannot be written ({problem.strerror}): its lines wait for room")
        self._told_full = problem is not None

    def look(self) -> None:
        """A step has just ended, and nothing was done since. If it was one as the plan for its batch has it, keep what
        it showed of the machine; the first of those predicts the steps anew."""
        engine, result = self._training.session.engine, self._training.optimizer.last_result
        plan = engine.in_force.plan
        ops = plan.wary_ops if result.wary else plan.ops
        was_flushed = engine.step.late is None and any(op.late for op in ops)
        if was_flushed or not engine.executor.runs(ops) or len(self._progress.seconds) < _LOOKED_AT:
            return
        self._telling_steps.append((ops, plan.pools, result.traces[-1]))
        if not self._refined_step:
            self._predict_anew(result.wary)

    def _predict_anew(self, wary: bool) -> None:
        """With the rates that the last step had, and say what differs."""
        planned, seen, plan = self._planner.hardware, self._seen(), self._training.plan
        self._refined_step, _ = step_seconds(plan, seen, wary and bool(plan.wary_ops))
        before = self._predicted()
        difference = abs(self._refined_step - before)
        if difference <= max(_WORTH_TELLING * before, _TELLING_SECONDS):
            return
        if is_doubtful(self._training.stores, self._planner.probed, seen):
            forget(self._training.session.device.torch_device)
        ratios = {lane: getattr(seen, name) / getattr(planned, name) for lane, name in RATES.items()}
        off = ", ".join(
            f"{lane} at {ratio:.2f} times" for lane, ratio in ratios.items() if abs(ratio - 1) > _WORTH_TELLING
        )
        self._reporter.say(
            f"steps are expected to take {format_seconds(self._refined_step)}, not {format_seconds(before)}: {off} the "
            f"rate that was planned with"
        )

    def _seen(self) -> HardwareSpec:
        """The machine as the middle one of the last telling steps showed it; as planned with where there was none."""
        if not self._telling_steps:
            return self._planner.hardware
        ordered = sorted(self._telling_steps, key=lambda step: step[2].seconds)
        return refined(self._planner.hardware, *ordered[len(ordered) // 2])

    def _predicted(self) -> float:
        """Seconds of a step by the plan, clipped or not as most of them were."""
        progress = self._progress
        return self._training.plan.predicted_seconds(wary=2 * progress.wary_steps > len(progress.seconds))

    def written(self) -> dict[str, int]:
        """Bytes written by this run, by the path of the store or the run directory."""
        parts, written = self._training.parts, Counter(self._progress.written_before)
        written.update(parts.points.moved_bytes)
        written.update(parts.session.store.homes.need_disk().written_bytes)
        written.update(self._models)
        return dict(written)

    def note_model(self) -> None:
        """The model was written into the run directory."""
        self._models[str(self._training.directory.resolve())] += weights_bytes(self._training.session.units)

    def written_to_drives(self) -> dict[str, int]:
        """Bytes that this run has written to each drive it is on now, which is called by the paths it has there."""
        return {_name(paths): written for paths, written in self._drives()}

    def _drives(self) -> list[tuple[list[Path], int]]:
        """With its paths on each: of the store, or, where that is not there, of the model."""
        paths: dict[int, list[Path]] = {}
        for path in self._training.stores:
            paths.setdefault(path.stat().st_dev, []).append(path)
        for path in map(Path, self._models):
            paths.setdefault(path.stat().st_dev, [path])
        written: Counter[int] = Counter()
        for name, num_bytes in self.written().items():
            if os.path.exists(name):  # also where the store has moved on
                written[os.stat(name).st_dev] += num_bytes
        return [(there, written[drive]) for drive, there in paths.items()]

    def write_trace(self) -> None:
        """trace.json: the last step beside the one that was predicted."""
        training = self._training
        result, plan = training.optimizer.last_result, training.session.engine.in_force.plan
        if not result.traces:
            return
        names = [unit.name for unit in training.session.units]
        ops = plan.wary_ops if result.wary else plan.ops
        predicted = simulate(ops, plan.pools, training.parts.planner.hardware)
        traces = {"measured (last step)": result.traces[-1], "predicted": predicted}
        path = training.directory / "trace.json"
        try:
            write_chrome_trace(path, traces, names)
        except OSError as error:  # the model is there
            path.unlink(missing_ok=True)
            self._reporter.say(f"warning: {path} cannot be written ({error.strerror})")

    def summarize(self) -> RunSummary:
        """Print what the run did, and keep how wrong its prediction was for the next one."""
        training, progress = self._training, self._progress
        with suppress(OSError):  # a full drive: the saved points know of all but the last
            note_written_bytes(training.directory, self.written())
        later = progress.seconds[1:] or progress.seconds or [0.0]
        losses = progress.losses or [math.nan]
        if len(later) >= _TELLING_STEPS and statistics.median(later) >= _TELLING_SECONDS:
            if self._telling_steps:
                note_rates(training.stores, self._planner.probed, self._seen())
            note_host_peak(training.stores, self._kind, training.plan.peaks.host, self._watch.peak)
        summary = RunSummary(
            progress.step,
            losses[0],
            losses[-1],
            progress.tokens / sum(progress.seconds) if progress.seconds else 0.0,
            self._predicted(),
            statistics.median(later),
            self._expected_peaks,
            self._peaks(),
            training.parts.budget,
            self.written_to_drives(),
            {_name(paths): warranted for paths, _ in self._drives() if (warranted := endurance_of(paths[0]))},
            str(training.output),
            training.state_bytes,
            tuple(progress.eval_losses),
            self._refined_step,
            training.phases,
            dict(self._watch.peaks),
        )
        print_summary(self._reporter.console, summary)
        return summary

    def _peaks(self) -> dict[str, int]:
        session = self._training.session
        disk = session.store.homes.need_disk().num_bytes
        return {"device": session.device.peak_bytes(), "host": self._watch.peak, "disk": disk}


def _name(paths: list[Path]) -> str:
    return " and ".join(map(str, paths))
