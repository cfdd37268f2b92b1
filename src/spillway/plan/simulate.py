"""Predicts the trace of a list of operations: the runtime's rules, with rates in place of machines."""

from spillway.spec.hardware import HardwareSpec
from spillway.spec.plan import LANES, Op, Plan, Pool
from spillway.spec.trace import Span, Trace

_OP_SECONDS = 50e-6  # what starting and finishing an operation costs a lane
UPDATE_BYTES = 26  # that an exact AdamW reads and writes of a parameter
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
    return _Simulation(ops, pools, hardware).run()


class _Simulation:
    """Lanes are numbered as in LANES; sets of lanes are bits. Written for speed: plans are chosen by it."""

    def __init__(self, ops: tuple[Op, ...], pools: tuple[Pool, ...], hardware: HardwareSpec) -> None:
        self._ops = ops
        self._hardware = hardware
        rates = _rates(hardware)
        flops = hardware.device_flops_per_s
        self._alone = [op.amount / rates.get((op.kind, op.lane), flops) + _OP_SECONDS for op in ops]
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

    def run(self) -> Trace:
        ops, waits, alone, queues = self._ops, self._waits, self._alone, self._queues
        lanes = range(len(LANES))
        heads = [0] * len(LANES)
        left, rates = [0.0] * len(LANES), [1.0] * len(LANES)
        started = [0.0] * len(LANES)
        running = [-1] * len(LANES)
        shares: dict[int, list[float]] = {}
        spans: list[Span] = []
        now, busy = 0.0, 0
        while len(spans) < len(ops):
            for lane in lanes:
                if running[lane] < 0 and heads[lane] < len(queues[lane]):
                    number = queues[lane][heads[lane]]
                    if not waits[number] and self._take(number):
                        running[lane], started[lane], left[lane] = number, now, alone[number]
                        heads[lane] += 1
                        busy |= 1 << lane
            found = shares.get(busy)
            if found is None:
                found = shares[busy] = [self._rate(lane, busy) for lane in lanes]
            rates = found
            passed = min(left[lane] / rates[lane] for lane in lanes if running[lane] >= 0)
            now += passed
            for lane in lanes:
                number = running[lane]
                if number < 0:
                    continue
                left[lane] -= passed * rates[lane]
                if left[lane] > 1e-12:
                    continue
                running[lane] = -1
                busy &= ~(1 << lane)
                op = ops[number]
                for follower in self._followers[number]:
                    waits[follower] -= 1
                for lease in op.give:
                    self._free[self._pool_of[lease]] += 1
                spans.append(Span(number, op.kind, op.lane, op.unit, op.group, started[lane], now, op.amount))
        return Trace(tuple(spans), now)

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
            return 1.0 / sum(other in _CORES for other in running)
        return 1.0


def step_seconds(plan: Plan, hardware: HardwareSpec) -> tuple[float, str]:
    """Predicted seconds of an optimizer step, accumulation included, and the lane that is busiest."""
    seconds, busy = 0.0, dict.fromkeys(LANES, 0.0)
    rounds = plan.rounds
    traces = {id(ops): simulate(ops, plan.pools, hardware) for ops in {id(ops): ops for ops in rounds}.values()}
    for ops in rounds:
        seconds += traces[id(ops)].seconds
        for lane, lane_seconds in traces[id(ops)].busy_s().items():
            busy[lane] += lane_seconds
    return seconds, max(busy, key=lambda lane: busy[lane])
