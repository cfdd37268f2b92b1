"""Plans, machines and findings as tables for people."""

from rich.console import Console
from rich.table import Table

from spillway.spec.answers import Finding, PlanReport
from spillway.spec.machine import Machine
from spillway.spec.sizes import counted, format_flops, format_seconds, format_size
from spillway.spec.words import as_flags


def print_report(console: Console, report: PlanReport) -> None:
    """The answer of `spillway plan`."""
    params = report.num_params
    count = f"{params / 1e9:.2f}B" if params >= 1e8 else f"{params / 1e6:.1f}M"
    console.print(f"{report.model}: {count} parameters on {report.machine}")
    if not report.fits:
        for item in report.helps:
            console.print(f"it would fit with {item.change}")
        return
    table = Table(show_header=False)
    for tier in ("device", "host", "disk"):
        peak, budget = getattr(report.peaks, tier), getattr(report.budget, f"{tier}_bytes")
        table.add_row(f"{tier} peak", f"{format_size(peak)} of {format_size(budget)}")
    others = (
        f"{phase} {format_size(peaks.device)}, {format_size(peaks.host)}, {format_size(peaks.disk)}"
        for phase, peaks in report.phases.items()
        if phase != "step"
    )
    table.add_row("other peaks (device, host, disk)", "; ".join(others))
    beside = f", {report.streams} micro-batches side by side" if report.streams > 1 else ""
    table.add_row("batch", f"{counted(report.rows, 'row')}, {report.micro_rows} at a time inside each unit{beside}")
    for part, tiers in report.placement.items():
        table.add_row(part, ", ".join(f"{counted(count, 'unit')} on {tier}" for tier, count in tiers.items()))
    table.add_row("kept for backward", ", ".join(f"{count} x {how}" for how, count in report.activations.items()))
    by = "" if report.policy == "auto" else f" (planned as {report.policy} would)"
    mixed = f", {report.deferred_units} units' in the next forward" if report.deferred_units else ""
    table.add_row("update", f"{report.update}{mixed}{by}")
    clipped = report.clipped_step_seconds
    slower = f", {format_seconds(clipped)} where gradients are clipped" if clipped else ""
    table.add_row("step", f"{format_seconds(report.step_seconds)} for {report.tokens:,} tokens{slower}")
    fewer = f", {report.tokens / clipped:,.0f} where gradients are clipped" if clipped else ""
    table.add_row("tokens per second", f"{report.tokens_per_s:,.0f}{fewer}")
    share = f" ({report.peak_share:.0%} of the device's peak)" if report.peak_share else ""
    table.add_row("model FLOP/s", f"{format_flops(report.model_flops_per_s)}{share}")
    busy = ", ".join(f"{lane} {part:.0%}" for lane, part in sorted(report.busy_share.items(), key=lambda x: -x[1]))
    table.add_row("bottleneck", f"{report.bottleneck} (busy: {busy})")
    table.add_row("written to disk", f"{format_size(report.written_bytes)} a step")
    if report.run_steps:
        low, high = (format_seconds(seconds) for seconds in report.run_seconds)
        table.add_row("run", f"{counted(report.run_steps, 'step')}, {low} to {high}")
        wear = f", {report.endurance_share:.1%} of the drives' endurance" if report.endurance_share else ""
        table.add_row("written by the run", f"{format_size(report.run_written_bytes)}{wear}")
    if any(report.dollars_per_million_tokens):
        run = f", {_span(report.dollars_per_run, 2)} for the run" if report.run_steps else ""
        per_million = _span(report.dollars_per_million_tokens, 3)
        table.add_row("dollars", f"{per_million} per million tokens{run} (GPU over three years, wear of drives)")
    console.print(table)
    for note in report.notes:
        console.print(f"note: {as_flags(note)}")
    for item in report.helps:
        console.print(f"would help: {item.change}, {item.gain:+.0%} tokens per second")


def _span(ends: tuple[float, float], digits: int) -> str:
    """From the lower end to the upper one, where one can see that they differ."""
    low, high = (f"{end:.{digits}f}" for end in ends)
    return low if low == high else f"{low} to {high}"


def print_sweep(console: Console, points: list[tuple[str, PlanReport]]) -> None:
    """One line per point."""
    table = Table("", "step", "tokens/s", "bottleneck", "host peak", "written a step")
    for at, report in points:
        if report.fits:
            table.add_row(
                at,
                format_seconds(report.step_seconds),
                f"{report.tokens_per_s:,.0f}",
                report.bottleneck,
                format_size(report.peaks.host),
                format_size(report.written_bytes),
            )
        else:
            table.add_row(at, "does not fit", "", "", "", "")
    console.print(table)


def print_machine(console: Console, machine: Machine) -> None:
    """What was measured."""
    rates = machine.hardware
    table = Table(title=machine.name, title_justify="left", show_header=False)
    table.add_row("device", f"{rates.device}, a transformer block at {format_flops(rates.device_flops_per_s)}")
    link = f"{_rate(rates.upload_bytes_per_s)}, {_rate(rates.download_bytes_per_s)}"
    table.add_row(
        "upload, download", link if rates.cores_shared else f"{link}; {rates.link_together:.0%} of each at once"
    )
    drives = f"{_rate(rates.read_bytes_per_s)}, {_rate(rates.write_bytes_per_s)}"
    table.add_row("drives, read and write", f"{drives}; {rates.disk_together:.0%} of each at once")
    update = f"{rates.update_params_per_s / 1e9:.2f} G parameters/s"
    on_device = f", {rates.device_update_params_per_s / 1e9:.2f} on the device"
    checked = f", {1 / (1 / rates.update_params_per_s + 1 / rates.checksum_params_per_s) / 1e9:.2f} with checksums"
    table.add_row("update", update + checked + ("" if rates.cores_shared else on_device))
    if rates.cores_shared:
        table.add_row("cores", f"{rates.cores_together:.0%} of each at once, of compute and update")
    table.add_row("host memory", f"one pass at {_rate(rates.host_bytes_per_s)}")
    sizes = (machine.device_bytes, machine.host_bytes, machine.disk_bytes)
    table.add_row("free: device, host, disk", ", ".join(map(format_size, sizes)))
    console.print(table)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """What was looked at, and what to do."""
    table = Table("", "found", "to do")
    for finding in findings:
        table.add_row(finding.what, finding.found, finding.fix or "nothing")
    console.print(table)


def _rate(bytes_per_s: float) -> str:
    return f"{format_size(bytes_per_s)}/s"
