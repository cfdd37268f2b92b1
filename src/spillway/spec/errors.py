"""Errors a user can meet: one sentence saying what happened, where, and what to do; each kind has an exit code."""

from typing import TypeVar

from spillway.spec.plan import TierPeaks

T = TypeVar("T")


class SpillwayError(Exception):
    """Anything the user can mend. `exit_code` is what the command line returns."""

    exit_code = 2


class UsageError(SpillwayError, ValueError):
    """A wrong option, model or call."""


class DataError(SpillwayError, ValueError):
    """Training data that cannot be used; the message names file and line."""


class PlanInfeasible(SpillwayError):
    """The model does not fit the given memory; the message names the tier, what it needs and what it has.

    `smallest` holds the peaks of the smallest pipeline: budgets of that size work.
    """

    exit_code = 3

    def __init__(self, message: str, smallest: TierPeaks) -> None:
        super().__init__(message)
        self.smallest = smallest


class HostMemoryError(SpillwayError):
    """A host allocation would go over the host budget, or the machine has no room for it; the message names its
    owner."""

    exit_code = 4


class DeviceMemoryError(SpillwayError):
    """The GPU has less memory than the plan was promised, or a call takes more; the message names what found no
    room."""

    exit_code = 3


class DiskError(SpillwayError, OSError):
    """A store path cannot be used; the message names path, offset and bytes where it knows them."""

    exit_code = 5


class DamageError(DiskError):
    """Bytes on a drive are not those that were written, or are no longer there; the message names file and offset."""


class NonFinite(SpillwayError):
    """The loss or a gradient is infinite or not a number; nothing of that step was kept."""

    exit_code = 6


class VerificationFailed(SpillwayError):
    """A streamed step is not what plain PyTorch computes."""

    exit_code = 1


class Interrupted(SpillwayError):
    """The run was interrupted after committing its last finished step."""

    exit_code = 130


class SkippedStep(UserWarning):
    """An optimizer step was not made, for its gradients were not finite."""


class NothingSaved(UserWarning):
    """Training was to go on from a saved point and there is none: it starts anew."""


class BudgetWarning(UserWarning):
    """A budget was cut to what the machine has."""


class StoreMoves(UserWarning):
    """A saved run is being checked and copied to other drives, which takes as long as reading it twice."""


class InvariantError(AssertionError):
    """A promise inside Spillway was broken: a bug of ours, never of the user."""


def required(value: T | None, message: str) -> T:
    """The value, which is there. Raises InvariantError where it is not."""
    if value is None:
        raise InvariantError(message)
    return value


def invariant(condition: bool, message: str) -> None:
    """Raise InvariantError unless `condition`; unlike `assert` it is never compiled away."""
    if not condition:
        raise InvariantError(message)
