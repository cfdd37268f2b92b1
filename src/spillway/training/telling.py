"""What a run says: its plan before the first step, a line of metrics for each, predicted beside measured at the end."""

import json
import math
import statistics

from spillway import native
from spillway.data import DataPosition
from spillway.hardware.calibration import calibration, note_run
from spillway.hardware.drives import endurance_of
from spillway.hardware.watch import MemoryWatch
from spillway.plan.simulate import simulate
from spillway.report.chrome import write_chrome_trace
from spillway.report.metrics import MetricsFile, StepMetrics, sum_lanes
from spillway.report.progress import Reporter
from spillway.report.tables import RunSummary, print_plan, print_summary
from spillway.spec.jsonable import to_json
from spillway.spec.options import TrainOptions
from spillway.training.progress import Progress
from spillway.training.setup import Training

# Steps, and seconds of each, from which on a run says something about predictions.
_TELLING_STEPS, _TELLING_SECONDS = 3, 0.2


class Telling:
    """Of one run."""

    def __init__(self, training: Training, progress: Progress, reporter: Reporter, watch: MemoryWatch) -> None:
        self._training = training
        self._progress = progress
        self._reporter = reporter
        self._watch = watch
        # Measured over predicted seconds of earlier runs on this machine.
        self._calibration = calibration(training.stores, training.session.device.kind, training.plan.bottleneck)

    def tell_plan(self) -> None:
        """Print it and write plan.json and config.json."""
        training, reporter, plan = self._training, self._reporter, self._training.plan
        kind, left = training.session.device.kind, training.total - self._progress.step
        shown = plan.calibrated(self._calibration)
        print_plan(reporter.console, shown, training.parts.budget, kind, training.state_bytes, left)
        homes = training.session.store.homes
        how = "O_DIRECT" if homes.need_disk().direct else "page cache"
        stores = ", ".join(map(str, training.stores))
        reporter.say(
            f"store {stores} ({homes.read_engine.backend}, {how}) · {training.options.optim} {native.kernel_name()}"
        )
        (training.directory / "plan.json").write_text(json.dumps(to_json(plan)))
        options, origins = training.options, training.origins
        values = {
            name: {"value": to_json(getattr(options, name)), "origin": origins.get(name, "default")}
            for name in TrainOptions.__dataclass_fields__
        }
        values["max_length"]["value"] = training.max_length
        chosen = "planner" if options.update == "auto" else origins.get("update", "default")
        values["update"] = {"value": plan.placement.update, "origin": chosen}
        (training.directory / "config.json").write_text(json.dumps(values, indent=2))

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
        metrics.add(
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
            )
        )

    def written(self) -> dict[str, int]:
        """Bytes written to each drive by this run."""
        before = self._progress.written_before
        now = self._training.session.store.homes.need_disk().written_bytes
        return {path: before.get(path, 0) + now.get(path, 0) for path in {**before, **now}}

    def write_trace(self) -> None:
        """trace.json: the last step beside the one that was predicted."""
        training = self._training
        result, plan = training.optimizer.last_result, training.plan
        if result is None:
            return
        names = [unit.name for unit in training.session.units]
        ops = plan.wary_ops if result.wary else plan.ops
        predicted = simulate(ops, plan.pools, training.parts.planner.hardware)
        traces = {"measured (last step)": result.traces[-1], "predicted": predicted}
        write_chrome_trace(training.directory / "trace.json", traces, names)

    def summarize(self) -> RunSummary:
        """Print what the run did, and keep how wrong its prediction was for the next one."""
        training, progress = self._training, self._progress
        later = progress.seconds[1:] or progress.seconds or [0.0]
        losses = progress.losses or [math.nan]
        predicted = training.plan.predicted_seconds(wary=2 * progress.wary_steps > len(progress.seconds))
        if len(later) >= _TELLING_STEPS and statistics.median(later) >= _TELLING_SECONDS:
            kind = training.session.device.kind
            note_run(training.stores, kind, training.plan.bottleneck, predicted, statistics.median(later))
        summary = RunSummary(
            progress.step,
            losses[0],
            losses[-1],
            progress.tokens / sum(progress.seconds) if progress.seconds else 0.0,
            self._calibration * predicted,
            statistics.median(later),
            training.plan.peaks,
            self._peaks(),
            training.parts.budget,
            self.written(),
            {str(path): warranted for path in training.stores if (warranted := endurance_of(path))},
            str(training.output),
            training.state_bytes,
            tuple(progress.eval_losses),
        )
        print_summary(self._reporter.console, summary)
        return summary

    def _peaks(self) -> dict[str, int]:
        session = self._training.session
        disk = session.store.homes.need_disk().num_bytes
        return {"device": session.device.peak_bytes(), "host": self._watch.peak, "disk": disk}
