"""Predicts the trace of a list of operations: the runtime's rules, with rates in place of machines."""

from functools import lru_cache
from typing import Any

from spillway.spec.hardware import UPDATE_BYTES, HardwareSpec
from spillway.spec.plan import HOME, LANES, Op, Plan, Pool
from spillway.spec.trace import Span, Trace

_OP_SECONDS = 50e-6  # what starting and finishing an operation costs a lane
_CORES = ("compute", "update", "upload", "download", "device")
_DISK = ("read", "write")
_LINK = ("upload", "download")
_LANE_NUMBERS = {lane: number for number, lane in enumerate(LANES)}
_NONE: list[Any] = []  # what most operations take and give


def _seconds_alone(ops: tuple[Op, ...], hardware: HardwareSpec) -> list[float]:
    """What each operation takes while no lane shares anything with its own."""
    rates = {
        ("READ", "read"): hardware.read_bytes_per_s,
        ("WRITE", "write"): hardware.write_bytes_per_s,
        ("COMMIT", "write"): hardware.write_bytes_per_s,
        ("UPLOAD", "upload"): hardware.upload_bytes_per_s,
        ("DOWNLOAD", "download"): hardware.download_bytes_per_s,
        ("UPDATE", "update"): hardware.update_params_per_s,
        ("UPDATE", "device"): hardware.device_update_params_per_s,
        ("ACCUMULATE", "update"): hardware.host_bytes_per_s,
        ("ACCUMULATE", "device"): UPDATE_BYTES * hardware.device_update_params_per_s,
        ("NORM", "update"): hardware.host_bytes_per_s,
        ("NORM", "device"): UPDATE_BYTES * hardware.device_update_params_per_s,
    }
    flops = hardware.device_flops_per_s  # of all others, which compute
    alone = [op.amount / rates.get((op.kind, op.lane), flops) + _OP_SECONDS for op in ops]
    for op in ops:
        # Of what is written, in a slab, checksums are taken.
        if op.kind == "UPDATE" and op.lane == "update" and op.target not in ("", HOME):
            alone[op.id] += op.amount / hardware.checksum_params_per_s
    return alone


def simulate(ops: tuple[Op, ...], pools: tuple[Pool, ...], hardware: HardwareSpec) -> Trace:
    """The predicted trace. Lanes that share a resource share its rate equally while both are busy."""
    found = _Simulation(ops, pools, hardware)
    found.run()
    spans = (
        Span(op.id, op.kind, op.lane, op.unit, op.group, found.started[op.id], found.ended[op.id], op.amount)
        for op in map(ops.__getitem__, found.order)
    )
    return Trace(tuple(spans), found.seconds)


class _Simulation:
    """Lanes are numbered as in LANES; sets of lanes are bits. Written for speed: plans are chosen by it.

    After `run`: the order in which operations ended, when each started and ended, and when all had (seconds).
    """

    def __init__(self, ops: tuple[Op, ...], pools: tuple[Pool, ...], hardware: HardwareSpec) -> None:
        self.order: list[int] = []
        self.started, self.ended = [0.0] * len(ops), [0.0] * len(ops)
        self.seconds = 0.0
        self._hardware = hardware
        self._alone = _seconds_alone(ops, hardware)
        self._waits = [len(op.deps) for op in ops]  # dependencies that are not done
        self._followers: list[list[int]] = [[] for _ in ops]
        self._queues: list[list[int]] = [[] for _ in LANES]
        numbers = {pool.name: number for number, pool in enumerate(pools)}
        self._free = [pool.count for pool in pools]
        self._granted = [0] * len(pools)
        turns = [0] * len(pools)
        self._wanted: list[list[tuple[int, int]]] = []  # per operation: the pools it takes from, and its turn there
        self._returned: list[list[int]] = []  # and those that it gives a slab back to
        pool_of: dict[str, int] = {}
        early: list[tuple[list[int], str]] = []  # given before they are taken: the list begins with them
        followers, queues, lanes = self._followers, self._queues, _LANE_NUMBERS
        for number, op in enumerate(ops):
            queues[lanes[op.lane]].append(number)
            for dep in op.deps:
                followers[dep].append(number)
            wanted, returned = _NONE, _NONE
            if op.take:
                wanted = []
                for name, lease in op.take:
                    pool = pool_of[lease] = numbers[name]
                    wanted.append((pool, turns[pool]))
                    turns[pool] += 1
            if op.give:
                returned = []
                for lease in op.give:
                    if lease in pool_of:
                        returned.append(pool_of[lease])
                    else:
                        early.append((returned, lease))
            self._wanted.append(wanted)
            self._returned.append(returned)
        for returned, lease in early:
            returned.append(pool_of[lease])
            self._free[pool_of[lease]] -= 1

    def run(self) -> None:
        waits, alone, queues, followers = self._waits, self._alone, self._queues, self._followers
        wanted, returned, free = self._wanted, self._returned, self._free
        order, started, ended = self.order, self.started, self.ended
        rates_of = _rates_while_busy(self._hardware)
        count = len(waits)
        heads = [0] * len(LANES)
        left = [0.0] * len(LANES)
        running = [-1] * len(LANES)
        idle = [lane for lane, queue in enumerate(queues) if queue]
        at_work: list[int] = []
        now, busy = 0.0, 0
        while len(order) < count:
            still = []
            for lane in idle:
                number = queues[lane][heads[lane]]
                if waits[number] or (wanted[number] and not self._take(wanted[number])):
                    still.append(lane)
                    continue
                running[lane], started[number], left[lane] = number, now, alone[number]
                heads[lane] += 1
                busy |= 1 << lane
                at_work.append(lane)
            rates = rates_of[busy]
            passed = min([left[lane] / rates[lane] for lane in at_work])
            now += passed
            at_work_before, at_work = at_work, []
            idle = still
            for lane in at_work_before:
                left[lane] -= passed * rates[lane]
                if left[lane] > 1e-12:
                    at_work.append(lane)
                    continue
                number = running[lane]
                busy &= ~(1 << lane)
                if heads[lane] < len(queues[lane]):
                    idle.append(lane)
                for follower in followers[number]:
                    waits[follower] -= 1
                for pool in returned[number]:
                    free[pool] += 1
                order.append(number)
                ended[number] = now
            idle.sort()
        self.seconds = now

    def _take(self, wanted: list[tuple[int, int]]) -> bool:
        """Take the slabs of an operation, if it is its turn and they are free."""
        free, granted = self._free, self._granted
        for pool, turn in wanted:
            if granted[pool] != turn or not free[pool]:
                return False
        for pool, _ in wanted:
            free[pool] -= 1
            granted[pool] += 1
        return True


@lru_cache(maxsize=16)
def _rates_while_busy(hardware: HardwareSpec) -> tuple[tuple[float, ...], ...]:
    """Per set of lanes that are busy: the share of its own rate that each lane has."""
    lanes = range(len(LANES))
    return tuple(tuple(_rate(hardware, lane, busy) for lane in lanes) for busy in range(1 << len(LANES)))


def _rate(hardware: HardwareSpec, lane: int, busy: int) -> float:
    name, running = LANES[lane], [other for number, other in enumerate(LANES) if busy >> number & 1]
    if name in _DISK and all(other in running for other in _DISK):
        return hardware.disk_together
    if name in _LINK and all(other in running for other in _LINK) and not hardware.cores_shared:
        return hardware.link_together
    if hardware.cores_shared and name in _CORES and name in running:
        at_work = sum(other in _CORES for other in running)
        return 2 * hardware.cores_together / at_work if at_work > 1 else 1.0
    return 1.0


def step_seconds(plan: Plan, hardware: HardwareSpec, wary: bool = False) -> tuple[float, str]:
    """Predicted seconds of an optimizer step, accumulation included, and the lane that is busiest. `wary`: of one that
    does not guess at the norm."""
    seconds, busy = 0.0, dict.fromkeys(LANES, 0.0)
    known: dict[int, _Simulation] = {}
    for ops in plan.rounds(wary):
        found = known.get(id(ops))
        if found is None:
            found = known[id(ops)] = _Simulation(ops, plan.pools, hardware)
            found.run()
        seconds += found.seconds
        for op, start, end in zip(ops, found.started, found.ended, strict=True):
            busy[op.lane] += end - start
    return seconds, max(busy, key=lambda lane: busy[lane])
