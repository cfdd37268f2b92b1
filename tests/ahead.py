"""States that are read in backward for the updates of the next forward, whether that makes the step faster or not."""

import pytest

from spillway.plan import spare
from spillway.plan.search import Search, Timed


def read_ahead_always(patch: pytest.MonkeyPatch) -> None:
    def always(search: Search, best: Timed) -> Timed:
        candidate = search._spare.with_read_ahead(best.candidate, 1.0)
        return best if candidate is best.candidate else search._simulate(candidate)

    patch.setattr(spare, "readable_ahead", lambda *_: 1e18)
    patch.setattr(Search, "_with_read_ahead", always)


def read_ahead_never(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Search, "_with_read_ahead", lambda _, best: best)
