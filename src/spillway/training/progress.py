"""How far a run has come."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spillway.checkpoint.points import SavedPoints
from spillway.data import DataPosition
from spillway.report.metrics import larger_of
from spillway.rundir import held_out_losses_shown, losses_shown, written_bytes


@dataclass(slots=True)
class Progress:
    """What the run has done so far. Bytes and seconds."""

    step: int = 0
    position: DataPosition = field(default_factory=DataPosition)  # of the next batch
    losses: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)  # of held-out data
    seconds: list[float] = field(default_factory=list)
    skipped: int = 0  # batches that were not finite
    skipped_in_a_row: int = 0
    wary_steps: int = 0  # by the plan's `wary_ops`, since this start of the run
    tokens: int = 0
    written_before: dict[str, int] = field(default_factory=dict)  # to each drive before this start of the run
    last: dict[str, Any] | None = None  # what the saved point that is gone on from knows of its step

    @classmethod
    def of(cls, points: SavedPoints, directory: Path) -> "Progress":
        """That of a run that goes on from its saved point."""
        saved = json.loads(points.found_run["position"])
        return cls(
            step=points.step,
            position=DataPosition(saved["epoch"], saved["index"]),
            losses=losses_shown(directory, points.step) or list(saved["losses"]),
            eval_losses=held_out_losses_shown(directory, points.step),
            last=saved["last"],
            written_before=points.under_new_names(
                larger_of(json.loads(points.found_run["written"]), written_bytes(directory))
            ),
        )

    def saved_with(self, after: DataPosition, loss: float, last: dict[str, Any]) -> str:
        """What a saved point of the step under way keeps for `of`. `last`: of that step."""
        first = [*self.losses[:1], loss][:1]
        return json.dumps({"epoch": after.epoch, "index": after.index, "losses": first, "last": last})

    def skip(self, after: DataPosition) -> None:
        """A batch was passed over."""
        self.skipped += 1
        self.position = after
