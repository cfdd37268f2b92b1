"""The planners of the field, as restrictions of ours: what each may choose from, so that they compare on equal terms.

`auto` may choose everything the others may. Sources are the papers' own descriptions; where a system overlaps less than
its design allows (DeepSpeed's offload runs read, update and write of a piece one after another), that is a restriction
of its pipeline.
"""

import difflib
from dataclasses import dataclass

from spillway.spec.errors import UsageError
from spillway.spec.plan import TIERS


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be chosen. Tiers and modes in any order; of window, slabs and streams the most there may be."""

    name: str
    source: str
    weights: tuple[str, ...] = TIERS
    states: tuple[str, ...] = TIERS
    grads: tuple[str, ...] = TIERS
    inputs: tuple[str, ...] = TIERS  # where inputs of units may wait for backward
    keeps: tuple[str, ...] = ("tape", "everything")  # what else may be kept
    kept_in: tuple[str, ...] = TIERS
    must_keep: bool = False  # nothing may be recomputed
    updates: tuple[str, ...] = ("serial", "overlap", "deferred")
    window: int = 4
    state_slabs: int = 4
    strides: bool = True  # some updates may run on the device, of states that rest elsewhere
    visits: bool = False  # all of them do
    reads_ahead: bool = False  # of states, for updates in the next forward
    streams: int = 1  # micro-batches side by side, at most
    in_turn: bool = False  # transfers and compute one after another
    sees_disk: bool = True  # traffic of the drives counts when activations are chosen


_NEAR = ("device", "host")
# With more of them each has too little memory to be worth it.
_STREAMS = 4
_FAR = ("host", "disk")


def _zero(name: str, source: str, weights: str, states: str, grads: str, inputs: str) -> Policy:
    """DeepSpeed's offload and its like: recompute, read, update and write one piece after another after backward, and
    hardly overlap transfers with compute before (Fuyou 3.2 and figure 2a)."""
    return Policy(name, source, (weights,), (states,), (grads,), (inputs,), keeps=(), updates=("serial",), window=2,
                  state_slabs=1, strides=False, in_turn=True)  # fmt: skip


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("auto", "Spillway", window=1024, state_slabs=64, reads_ahead=True,
               streams=_STREAMS),
        _zero("zero-offload", "LoHan V-A: states in host memory, inputs of blocks swapped there, update after backward",
              "host", "host", "host", "host"),
        _zero("zero-infinity", "LoHan III-B, Fuyou 2.2: states on disk, inputs of blocks in host memory only",
              "disk", "disk", "disk", "host"),
        _zero("colossal-ai", "LoHan V-A, Fuyou 5.1: parameters in host memory, states on disk, inputs on the device",
              "host", "disk", "host", "device"),
        Policy("flashneuron", "LoHan III-A: states on the device, activations on disk, nothing recomputed",
               weights=("device",), states=("device",), inputs=("disk",), keeps=("everything",), kept_in=("disk",),
               must_keep=True, updates=("serial", "overlap"), strides=False),
        Policy("g10", "LoHan III-C: everything on disk, nothing recomputed, update on the device",
               weights=("disk",), states=("disk",), grads=_FAR, inputs=_FAR, keeps=("everything",), kept_in=_FAR,
               must_keep=True, updates=("serial",), visits=True),
        Policy("capuchin", "LoHan V-E, its states and update; swaps to host memory as the link allows, blind to drives",
               weights=("disk",), states=("disk",), grads=_FAR, inputs=_NEAR, kept_in=_NEAR,
               updates=("overlap",), strides=False, sees_disk=False),
        Policy("checkmate", "LoHan V-E, its states and update; recomputes or moves to host memory, by cost",
               weights=("disk",), states=("disk",), grads=_FAR, inputs=_NEAR, kept_in=_NEAR,
               updates=("overlap",), strides=False, sees_disk=False),
        Policy("lohan", "LoHan IV: states on disk, updated within backward; swaps to host memory, then disk",
               weights=("disk",), states=("disk",), grads=_FAR, inputs=_FAR, kept_in=_FAR, updates=("overlap",),
               strides=False),
        Policy("fuyou", "Fuyou 4: the first version of LoHan",
               weights=("disk",), states=("disk",), grads=_FAR, inputs=_FAR, kept_in=_FAR, updates=("overlap",),
               strides=False),
        Policy("stronghold", "STRONGHOLD: a window over states in host memory, updated within backward",
               weights=_NEAR, states=_NEAR, grads=_NEAR, inputs=_NEAR, keeps=(), updates=("overlap",), strides=False,
               streams=_STREAMS),
        Policy("protrain", "ProTrain: persistent chunks, buffers, swapped and checkpointed blocks",
               weights=_NEAR, states=_NEAR, grads=_NEAR, inputs=_NEAR, keeps=("everything",), kept_in=_NEAR,
               updates=("overlap",), strides=False),
        Policy("deep-optimizer-states", "Deep Optimizer States: states in host memory, every k-th update on the device",
               weights=_NEAR, states=("host",), grads=("host",), inputs=_NEAR, keeps=(), updates=("serial",)),
    )
}  # fmt: skip


def find_policy(name: str) -> Policy:
    """The policy of that name. Raises UsageError with near names."""
    if name in POLICIES:
        return POLICIES[name]
    near = difflib.get_close_matches(name, POLICIES, 2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(POLICIES)}"
    raise UsageError(f"there is no policy '{name}': {hint}")
