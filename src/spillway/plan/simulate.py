"""Predicts the trace of a list of operations: the runtime's rules, with rates in place of machines."""

from spillway.spec.hardware import UPDATE_BYTES, HardwareSpec
from spillway.spec.plan import HOME, LANES, Op, Plan, Pool
from spillway.spec.trace import Span, Trace

_OP_SECONDS = 50e-6  # what starting and finishing an operation costs a lane
_CORES = ("compute", "update", "upload", "download", "device")
_DISK = ("read", "write")
_LINK = ("upload", "download")


def _rates(hardware: HardwareSpec) -> dict[tuple[str, str], float]:
    """What operations of a kind and lane go through in a second; all others compute."""
    return {
        ("READ", "read"): hardware.read_bytes_per_s,
        ("WRITE", "write"): hardware.write_bytes_per_s,
        ("COMMIT", "write"): hardware.write_bytes_per_s,
        ("UPLOAD", "upload"): hardware.upload_bytes_per_s,
        ("DOWNLOAD", "download"): hardware.download_bytes_per_s,
        ("UPDATE", "update"): hardware.update_params_per_s,
        ("UPDATE", "device"): hardware.device_update_params_per_s,
        ("ACCUMULATE", "update"): hardware.host_bytes_per_s,
        ("NORM", "update"): hardware.host_bytes_per_s,
        ("NORM", "device"): UPDATE_BYTES * hardware.device_update_params_per_s,
    }


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
        self._ops = ops
        self._hardware = hardware
        rates = _rates(hardware)
        flops = hardware.device_flops_per_s
        self._alone = [op.amount / rates.get((op.kind, op.lane), flops) + _OP_SECONDS for op in ops]
        for op in ops:
            is_written = op.target not in ("", HOME)  # in a slab, whose checksums are taken
            if op.kind == "UPDATE" and op.lane == "update" and is_written:
                self._alone[op.id] += op.amount / hardware.checksum_params_per_s
        self._waits = [len(op.deps) for op in ops]  # dependencies that are not done
        self._followers: list[list[int]] = [[] for _ in ops]
        numbers = {lane: number for number, lane in enumerate(LANES)}
        self._lane_of = [numbers[op.lane] for op in ops]
        self._queues: list[list[int]] = [[] for _ in LANES]
        self._free = {pool.name: pool.count for pool in pools}
        self._granted = dict.fromkeys(self._free, 0)
        self._turns: dict[int, list[tuple[str, int]]] = {}  # operation -> the pools it takes from, and its turn there
        self._pool_of: dict[str, str] = {}
        turns = dict.fromkeys(self._free, 0)
        for op in ops:
            number = op.id
            self._queues[self._lane_of[number]].append(number)
            for dep in op.deps:
                self._followers[dep].append(number)
            for pool, lease in op.take:
                self._turns.setdefault(number, []).append((pool, turns[pool]))
                turns[pool] += 1
                self._pool_of[lease] = pool
        for lease in _found(ops):
            self._free[self._pool_of[lease]] -= 1

    def run(self) -> None:
        ops, waits, alone, queues = self._ops, self._waits, self._alone, self._queues
        order, started, ended = self.order, self.started, self.ended
        heads = [0] * len(LANES)
        left = [0.0] * len(LANES)
        running = [-1] * len(LANES)
        idle = [lane for lane, queue in enumerate(queues) if queue]
        at_work: list[int] = []
        shares: dict[int, list[float]] = {}
        now, busy = 0.0, 0
        while len(order) < len(ops):
            still = []
            for lane in idle:
                number = queues[lane][heads[lane]]
                if waits[number] or not self._take(number):
                    still.append(lane)
                    continue
                running[lane], started[number], left[lane] = number, now, alone[number]
                heads[lane] += 1
                busy |= 1 << lane
                at_work.append(lane)
            idle = still
            rates = shares.get(busy)
            if rates is None:
                rates = shares[busy] = [self._rate(lane, busy) for lane in range(len(LANES))]
            passed = min([left[lane] / rates[lane] for lane in at_work])
            now += passed
            at_work_before, at_work = at_work, []
            for lane in at_work_before:
                left[lane] -= passed * rates[lane]
                if left[lane] > 1e-12:
                    at_work.append(lane)
                    continue
                number = running[lane]
                busy &= ~(1 << lane)
                if heads[lane] < len(queues[lane]):
                    idle.append(lane)
                for follower in self._followers[number]:
                    waits[follower] -= 1
                for lease in ops[number].give:
                    self._free[self._pool_of[lease]] += 1
                order.append(number)
                ended[number] = now
            idle.sort()
        self.seconds = now

    def _take(self, number: int) -> bool:
        """Take the slabs of an operation, if it is its turn and they are free."""
        wanted = self._turns.get(number)
        if wanted is None:
            return True
        if any(self._granted[pool] != turn or not self._free[pool] for pool, turn in wanted):
            return False
        for pool, _ in wanted:
            self._free[pool] -= 1
            self._granted[pool] += 1
        return True

    def _rate(self, lane: int, busy: int) -> float:
        name, running = LANES[lane], [other for number, other in enumerate(LANES) if busy >> number & 1]
        if name in _DISK and all(other in running for other in _DISK):
            return self._hardware.disk_together
        if name in _LINK and all(other in running for other in _LINK) and not self._hardware.cores_shared:
            return self._hardware.link_together
        if self._hardware.cores_shared and name in _CORES and name in running:
            at_work = sum(other in _CORES for other in running)
            return 2 * self._hardware.cores_together / at_work if at_work > 1 else 1.0
        return 1.0


def _found(ops: tuple[Op, ...]) -> list[str]:
    """The leases that a list begins with: it gives them before it takes them."""
    taken: set[str] = set()
    found = []
    for op in ops:
        taken.update(lease for _, lease in op.take)
        found += [lease for lease in op.give if lease not in taken]
    return found


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
