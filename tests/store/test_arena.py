import pytest

from spillway.spec.errors import HostMemoryError, InvariantError
from spillway.spec.plan import Op, Pool
from spillway.store.arena import Arena, SlabPools


def test_an_arena_that_is_used_up_names_who_asked() -> None:
    arena = Arena(1 << 20)
    arena.allocate(1 << 19, "weights")
    with pytest.raises(HostMemoryError, match=r"the optimizer state of unit 3 needs .* raise host_memory"):
        arena.allocate(1 << 20, "the optimizer state of unit 3")


def test_memory_after_a_mark_comes_back() -> None:
    arena = Arena(1 << 20)
    kept = arena.allocate(4096, "kept")
    kept.fill_(7)
    mark = arena.mark()
    used = arena.allocate(1 << 19, "used")
    arena.reset_to(mark)
    again = arena.allocate(1 << 19, "again").fill_(9)
    assert again.data_ptr() == used.data_ptr() and int(kept[0]) == 7


def take(number: int, lease: str) -> Op:
    return Op(number, "READ", "read", 0, "weight", 1, (), (("p", lease),))


def test_leases_are_granted_in_list_order_and_carry_the_event_of_their_last_use() -> None:
    arena = Arena(1 << 20)
    pools = SlabPools((Pool("p", "host", 4096, 1),), {"p": [arena.allocate(4096, "p")]})
    first, second = take(0, "a"), take(1, "b")
    pools.start((first, second))
    assert pools.try_take(second) is None
    assert pools.try_take(first) == []
    assert pools.try_take(second) is None
    pools.give(Op(2, "UPLOAD", "upload", 0, "weight", 1, (), (), ("a",)), "event")
    assert pools.try_take(second) == ["event"]
    with pytest.raises(InvariantError, match="outlived"):
        pools.start(())
    pools.abandon(None)
    pools.start(())
