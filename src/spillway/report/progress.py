"""Progress of anything that takes longer than two seconds: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from spillway.spec.sizes import format_seconds

_LINE_EVERY_S = 10.0


def answers() -> Console:
    """Where what a command was asked for goes: standard output."""
    return Console(highlight=False, soft_wrap=True)


class Reporter:
    """Where a run shows what it does. Everything goes to standard error; standard output is for results."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text)

    @contextmanager
    def counting(self, label: str, total: float | None = None) -> Iterator["Counter"]:
        """A bar for counted work such as loading or reading data."""
        with self._bar(MofNCompleteColumn() if total is None else TextColumn("{task.percentage:>3.0f}%")) as bar:
            yield Counter(bar, label, total)

    @contextmanager
    def training(self, total: int, done: int) -> Iterator["StepLine"]:
        """A bar for optimizer steps with the loss and speed in it."""
        columns = (MofNCompleteColumn(), TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)))
        with self._bar(*columns) as bar:
            yield StepLine(self, bar, total, done)

    def _bar(self, *columns: ProgressColumn) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24 if self.console.width >= 100 else 10),
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=False,
            disable=not self.console.is_terminal,
        )


class Counter:
    """Advances a bar."""

    def __init__(self, bar: Progress, label: str, total: float | None) -> None:
        self._bar = bar
        self._task = bar.add_task(label, total=total)

    def advance(self, amount: float) -> None:
        """So much more is done."""
        self._bar.advance(self._task, amount)

    def reach(self, amount: float) -> None:
        """So much is done in all."""
        self._bar.update(self._task, completed=amount)


class StepLine:
    """The progress of training."""

    def __init__(self, reporter: Reporter, bar: Progress, total: int, done: int) -> None:
        self._reporter = reporter
        self._bar = bar
        self._total = total
        self._task = bar.add_task("training", total=total, completed=done, figures="")
        self._last_line = 0.0

    def step(self, step: int, loss: float, grad_norm: float, learning_rate: float, tokens: int, seconds: float) -> None:
        """One optimizer step is done."""
        parts = [
            f"loss {loss:.4f}",
            f"{tokens / seconds:,.0f} tok/s",
            f"{format_seconds(seconds)}/step",
            f"grad {grad_norm:.2f}",
            f"lr {learning_rate:.2e}",
        ]
        figures = " · ".join(parts)
        # A bar, the count and the times take about 60 columns; figures get what is left of the line.
        room = self._reporter.console.width - 62
        fitting = [part for index, part in enumerate(parts) if len(" · ".join(parts[: index + 1])) <= room]
        self._bar.update(self._task, completed=step, figures=" · ".join(fitting))
        now = time.monotonic()
        if not self._reporter.console.is_terminal and (
            now - self._last_line > _LINE_EVERY_S or step in (1, self._total)
        ):
            self._reporter.say(f"step {step}/{self._total} · {figures}")
            self._last_line = now
