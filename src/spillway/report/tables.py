"""The summary at the end of a run and the plan at its start, for people."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from spillway.spec.hardware import Budget
from spillway.spec.plan import Plan, TierPeaks
from spillway.spec.sizes import counted, format_seconds, format_size
from spillway.spec.words import as_flags


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a finished (or interrupted) run did. Bytes and seconds."""

    steps: int
    first_loss: float
    last_loss: float
    tokens_per_s: float
    predicted_step_s: float
    measured_step_s: float  # 0, as tokens_per_s, where no step was left to make
    predicted_peaks: TierPeaks
    measured_peaks: dict[str, int]
    budget: Budget
    written_bytes: dict[str, int]  # to each drive
    endurance_bytes: dict[str, float]  # what its maker warrants, where that is known
    output: str
    state_bytes: int
    eval_losses: tuple[float, ...] = ()  # of held-out data
    refined_step_s: float = 0.0  # predicted anew after the first steps, with their rates; 0 where there were none
    predicted_phases: dict[str, TierPeaks] = field(default_factory=dict)  # load, step, evaluation, save, export
    measured_phases: dict[str, int] = field(default_factory=dict)  # host bytes of those there were


def print_plan(console: Console, plan: Plan, budget: Budget, device: str, state_bytes: int, steps: int) -> None:
    """Where the model state goes, in a few lines; `steps` are still to be done."""
    units = plan.placement.units
    trained = [unit for unit in units if unit.states != "none"]
    weights = ", ".join(
        _count(units, "weights", tier) for tier in ("device", "host", "disk") if _any(units, "weights", tier)
    )
    states = ", ".join(
        _count(trained, "states", tier) for tier in ("device", "host", "disk") if _any(trained, "states", tier)
    )
    host = "host (device included)" if device == "cpu" else "host"
    console.print(
        f"model state {format_size(state_bytes)} in {counted(len(units), 'unit')} · weights: {weights} · "
        f"states: {states}"
    )
    console.print(
        f"peaks: device {format_size(plan.peaks.device)} of {format_size(budget.device_bytes)} · "
        f"{host} {format_size(plan.peaks.host)} of {format_size(budget.host_bytes)} · "
        f"disk {format_size(plan.peaks.disk)} of {format_size(budget.disk_bytes)}"
    )
    late = plan.placement.mixed_in
    mixed = f", {late} units' in the next forward" if late else ""
    console.print(
        f"update {plan.placement.update}{mixed} · predicted {format_seconds(plan.step_seconds)} a step"
        f"{_when_clipped(plan)}, busiest lane: {plan.bottleneck}"
    )
    a_step = plan.bytes_written
    if a_step and steps:
        console.print(
            f"writes {format_size(a_step)} a step to disk, {format_size(a_step * steps)} in {counted(steps, 'step')}"
        )
    for note in plan.notes:
        console.print(f"note: {as_flags(note)}")


def print_summary(console: Console, summary: RunSummary) -> None:
    """The closing table."""
    table = Table(title="Spillway run", title_justify="left")
    for column, justify in (("", "left"), ("predicted", "right"), ("measured", "right"), ("budget", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    predicted = format_seconds(summary.predicted_step_s)
    if summary.refined_step_s:
        predicted += f", after the first steps {format_seconds(summary.refined_step_s)}"
    measured_step = format_seconds(summary.measured_step_s) if summary.measured_step_s else "no step was left"
    table.add_row("seconds per step", predicted, measured_step, "")
    budgets = {
        "device": summary.budget.device_bytes,
        "host": summary.budget.host_bytes,
        "disk": summary.budget.disk_bytes,
    }
    for tier, budget in budgets.items():
        predicted = getattr(summary.predicted_peaks, tier)
        measured = summary.measured_peaks.get(tier, 0)
        shown = format_size(measured) if measured else "in host"
        table.add_row(f"{tier} peak", format_size(predicted), shown, format_size(budget))
    for phase, peak in summary.measured_phases.items():
        if phase != "step":
            predicted = format_size(summary.predicted_phases[phase].host)
            table.add_row(f"host, {phase}", predicted, format_size(peak), "")
    table.add_row("model state", format_size(summary.state_bytes), "", "")
    table.add_row("loss, first to last", "", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}", "")
    if summary.eval_losses:
        table.add_row("held-out loss", "", f"{summary.eval_losses[0]:.4f} -> {summary.eval_losses[-1]:.4f}", "")
    if summary.tokens_per_s:
        table.add_row("tokens per second", "", f"{summary.tokens_per_s:,.0f}", "")
    for path, written in summary.written_bytes.items():
        name = "written to disk" if len(summary.written_bytes) == 1 else f"written to {path}"
        warranted = summary.endurance_bytes.get(path)
        share = f", {100 * written / warranted:.2g}% of its rated endurance" if warranted else ""
        table.add_row(name, "", f"{format_size(written)}{share}", "")
    console.print(table)
    console.print(f"{counted(summary.steps, 'step')} done; the model is in {summary.output}")


def _when_clipped(plan: Plan) -> str:
    return f" ({format_seconds(plan.wary_step_seconds)} where gradients are clipped)" if plan.wary_ops else ""


def _any(units: object, part: str, tier: str) -> bool:
    return any(getattr(unit, part) == tier for unit in units)  # type: ignore[attr-defined]


def _count(units: object, part: str, tier: str) -> str:
    return f"{sum(getattr(unit, part) == tier for unit in units)} on {tier}"  # type: ignore[attr-defined]
