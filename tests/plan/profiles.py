"""Random models, machines and placements for property tests."""

from hypothesis import strategies as st

from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import CallProfile, ModelProfile, OperatorClass, UnitProfile
from spillway.spec.plan import ACTIVATIONS
from spillway.spec.sizes import PAGE

MACHINE = HardwareSpec("cuda", 1e14, 2e10, 2e10, 6e9, 5e9, 2e9, 2e10)
CPU = HardwareSpec("cpu", 4e11, 1e10, 1e10, 2e9, 2e9, 2e9, 2e10, cores_shared=True)
PLENTY = Budget(10**12, 10**12, 10**14, 10**8)


def unit(elements: int, trained: float = 1.0, name: str = "unit") -> UnitProfile:
    """A bfloat16 unit, of which that share is trained."""
    elements = -(-elements // PAGE) * PAGE
    moving = -(-int(trained * elements) // PAGE) * PAGE
    return UnitProfile(name, elements, moving, 2 * elements, 2 * moving, 10 * moving)


def operators(flops: float, saved_bytes: int) -> tuple[OperatorClass, ...]:
    """Of a transformer block: what is worth most takes least, and a third of what is saved is worth nothing."""
    pages = saved_bytes // PAGE
    return (
        OperatorClass("matmul 4096", 0.3 * flops, pages // 9 * PAGE, 1),
        OperatorClass("matmul 1024", 0.6 * flops, pages // 2 * PAGE, 3),
        OperatorClass("attention", 0.1 * flops, pages // 9 * PAGE, 2),
        OperatorClass("other", 0.0, pages * PAGE, 9, cheap=True),
    )


def chain(
    count: int, elements: int = 1 << 20, act_bytes: int = 1 << 20, tied: bool = False, flops: float = 1e9
) -> ModelProfile:
    """Embedding, blocks, head; the head may be the embedding again."""
    units = [unit(2 * elements), *(unit(elements) for _ in range(count)), *([] if tied else [unit(2 * elements)])]
    order = [*range(count + 1), 0 if tied else count + 1]
    calls = [
        CallProfile(
            index,
            flops,
            0 if place == 0 else act_bytes,
            4 * act_bytes,
            "LOSS" if place == count + 1 else "FORWARD",
            operators=operators(flops, 4 * act_bytes) if 0 < place <= count else (),
        )
        for place, index in enumerate(order)
    ]
    return ModelProfile(tuple(units), tuple(calls), tokens=1024)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    """Units of any size called in any order, some twice, some never, some frozen, some but for a small part."""
    sizes = draw(
        st.lists(st.tuples(st.integers(1, 1 << 22), st.sampled_from([0.0, 0.01, 1.0])), min_size=1, max_size=7)
    )
    units = tuple(unit(size, trained, f"unit{index}") for index, (size, trained) in enumerate(sizes))
    order = draw(st.lists(st.integers(0, len(units) - 1), min_size=1, max_size=14))
    acts = st.integers(0, 50).map(lambda pages: pages * PAGE)
    calls = tuple(_call(index, draw(acts), draw(acts), draw(st.booleans())) for index in order)
    uncalled = [index for index in range(len(units)) if index not in order]
    residents = frozenset(draw(st.lists(st.sampled_from(uncalled), max_size=2)) if uncalled else ())
    return ModelProfile(units, calls, 0, residents)


def _call(unit: int, act_bytes: int, saved_bytes: int, has_operators: bool) -> CallProfile:
    known = operators(1e8, saved_bytes) if has_operators else ()
    return CallProfile(unit, 1e8, act_bytes, saved_bytes, operators=known)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    """What a user may fix."""
    clip, accumulation = draw(st.booleans()), draw(st.sampled_from([1, 3]))
    weights, states = draw(
        st.sampled_from(
            [(w, s) for w in ("auto", "device", "host", "disk") for s in ("auto", "host", "disk")]
            + [("auto", "device"), ("device", "device")]
        )
    )
    return {
        "update": draw(st.sampled_from(["auto", "serial", "deferred", "overlap"])),
        "weights": weights,
        "states": states,
        "clip": clip,
        "accumulation": accumulation,
        "activations": draw(st.sampled_from(ACTIVATIONS)),
    }
