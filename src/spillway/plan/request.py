"""What a plan is asked for, and what that leaves to choose."""

from dataclasses import dataclass, replace

from spillway.plan.policies import Policy, find_policy
from spillway.spec.errors import UsageError
from spillway.spec.plan import ACTIVATIONS, LAST_POINT, TIERS, UPDATE_MODES, KeepPoints, Placement


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user fixed; 'auto' leaves the choice to the planner."""

    update: str = "auto"
    weights: str = "auto"
    states: str = "auto"
    clip: bool = False
    accumulation: int = 1
    has_store: bool = True
    keep: KeepPoints = LAST_POINT
    activations: str = "auto"  # one of ACTIVATIONS
    policy: str = "auto"  # one of POLICIES
    tapes: bool = True  # not where blocks are compiled, whose operators nobody sees
    goes_on: bool = False  # from a saved point, which must stay until there is another
    streams: int | None = None  # micro-batches of a call at a time; None leaves that to the planner
    fixed: Placement | None = None  # units already rest where it says: only the step is planned


@dataclass(frozen=True, slots=True)
class Space:
    """What is left to choose from: the user's wishes within the policy. Tiers from the farthest to the nearest."""

    weights: tuple[str, ...]
    states: tuple[str, ...]
    grads: tuple[str, ...]
    inputs: tuple[str, ...]
    keeps: tuple[str, ...]  # of "tape" and "everything"
    kept_in: tuple[str, ...]
    update: str  # a mode, or "auto"
    policy: Policy

    @property
    def may_defer(self) -> bool:
        """Whether some units may leave their updates to the next forward and others not."""
        return self.update == "auto" and "deferred" in self.policy.updates

    def in_memory(self) -> "Space | None":
        """The same without the drives for weights, states and gradients: slabs that these pass through are then not
        needed, so all of them may fit where a part does not. None where that is no other space."""
        weights, states, grads = map(_without_disk, (self.weights, self.states, self.grads))
        if not (weights and states and grads) or "disk" not in self.states:
            return None
        return replace(self, weights=weights, states=states, grads=grads)

    def without_drives(self) -> "Space | None":
        """As `in_memory`, and without the drives for activations, too. None where that is no other space."""
        space, inputs, kept_in = self.in_memory(), _without_disk(self.inputs), _without_disk(self.kept_in)
        if space is None or not inputs or inputs == self.inputs or (self.kept_in and not kept_in):
            return None
        return replace(space, inputs=inputs, kept_in=kept_in)


def _without_disk(tiers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(tier for tier in tiers if tier != "disk")


def space_of(request: PlanRequest) -> Space:
    """Raises UsageError where wishes contradict each other, the policy, or the lack of a store."""
    policy = find_policy(request.policy)
    weights = _tiers("weights", request.weights, policy.weights, policy, request.has_store)
    states = _tiers("states", request.states, policy.states, policy, request.has_store)
    if request.states == "device" and request.weights not in ("auto", "device"):
        raise UsageError(f"states='device' needs the weights there too, not weights='{request.weights}'")
    if request.streams is not None and request.streams > 1 and policy.streams == 1:
        raise UsageError(
            f"policy '{policy.name}' computes one micro-batch after another, not streams={request.streams}"
        )
    wanted, keeps, kept_in = request.activations, policy.keeps, policy.kept_in
    if wanted not in ACTIVATIONS:
        raise UsageError(f"activations='{wanted}' is not one of {', '.join(ACTIVATIONS)}")
    if wanted == "disk" and not request.has_store:
        raise UsageError("activations='disk' needs a store: give the path of a directory on a fast drive")
    if wanted == "tape" and not request.tapes:
        raise UsageError("activations='tape' needs blocks that are not compiled: choose 'recompute', 'keep' or 'host'")
    if not request.tapes and request.streams is not None and request.streams > 1:
        raise UsageError("streams need blocks that are not compiled: a compiled one may keep memory from call to call")
    if not request.tapes:
        keeps = tuple(level for level in keeps if level != "tape")
    if wanted == "recompute":
        keeps = ()
    elif wanted == "tape":
        keeps = ("tape",)
    elif wanted == "keep":
        keeps, kept_in = ("everything",), ("device",)
    elif wanted in TIERS:
        keeps, kept_in = ("everything",), (wanted,)
    inputs = _tiers("inputs of units", "auto", policy.inputs, policy, request.has_store)
    grads = _tiers("gradients", "auto", policy.grads, policy, request.has_store)
    kept = tuple(tier for tier in _FARTHEST_FIRST if tier in kept_in and (tier != "disk" or request.has_store))
    return Space(weights, states, grads, inputs, keeps, kept, _update(request, policy), policy)


_FARTHEST_FIRST = ("disk", "host", "device")


def _tiers(what: str, wanted: str, allowed: tuple[str, ...], policy: Policy, has_store: bool) -> tuple[str, ...]:
    if wanted not in ("auto", *TIERS):
        raise UsageError(f"{what}='{wanted}' is not one of auto, {', '.join(TIERS)}")
    if wanted == "disk" and not has_store:
        raise UsageError(f"{what}='disk' needs a store: give the path of a directory on a fast drive")
    if wanted != "auto" and wanted not in allowed:
        raise UsageError(f"policy '{policy.name}' keeps {what} on {' or '.join(allowed)}, not on {wanted}")
    tiers = tuple(tier for tier in _FARTHEST_FIRST if tier in (allowed if wanted == "auto" else (wanted,)))
    if not has_store:
        tiers = tuple(tier for tier in tiers if tier != "disk")
    if not tiers:
        raise UsageError(f"policy '{policy.name}' needs a store: give the path of a directory on a fast drive")
    return tiers


def _update(request: PlanRequest, policy: Policy) -> str:
    """The mode, or 'auto'."""
    if request.fixed is not None:
        return request.fixed.update
    if request.update not in ("auto", *UPDATE_MODES):
        raise UsageError(f"update='{request.update}' is not one of auto, {', '.join(UPDATE_MODES)}")
    if request.update != "auto":
        if request.update.removesuffix("-naive") not in policy.updates:
            raise UsageError(f"policy '{policy.name}' updates {' or '.join(policy.updates)}, not {request.update}")
        return request.update
    return "auto" if len(policy.updates) > 1 else policy.updates[0]
