"""Predicts the trace of a list of operations: the runtime's rules, with rates in place of machines."""

from spillway.spec.hardware import HardwareSpec
from spillway.spec.plan import LANES, Op, Plan, Pool
from spillway.spec.trace import Span, Trace

_OP_SECONDS = 50e-6  # what starting and finishing an operation costs a lane
_CORES = ("compute", "update", "upload", "download")
_DISK = ("read", "write")


def alone_seconds(op: Op, hardware: HardwareSpec) -> float:
    """Seconds an operation takes with its lane's resource to itself."""
    rates = {
        "READ": hardware.read_bytes_per_s,
        "WRITE": hardware.write_bytes_per_s,
        "UPLOAD": hardware.upload_bytes_per_s,
        "DOWNLOAD": hardware.download_bytes_per_s,
        "UPDATE": hardware.update_params_per_s,
        "ACCUMULATE": hardware.host_bytes_per_s,
        "NORM": hardware.host_bytes_per_s,
    }
    rate = rates.get(op.kind, hardware.device_flops_per_s)
    return op.amount / rate + _OP_SECONDS


def simulate(ops: tuple[Op, ...], pools: tuple[Pool, ...], hardware: HardwareSpec) -> Trace:
    """The predicted trace. Lanes that share a resource share its rate equally while both are busy."""
    lanes = {lane: [op for op in ops if op.lane == lane] for lane in LANES}
    heads = dict.fromkeys(LANES, 0)
    queues = {pool.name: [op.id for op in ops for name, _ in op.take if name == pool.name] for pool in pools}
    granted = dict.fromkeys(queues, 0)
    free = {pool.name: pool.count for pool in pools}
    pool_of = {lease: name for op in ops for name, lease in op.take}
    done = [False] * len(ops)
    running: dict[str, tuple[Op, float, float]] = {}  # lane -> op, start, work left in seconds alone
    spans: list[Span] = []
    now = 0.0
    while len(spans) < len(ops):
        for lane in LANES:
            if lane in running or heads[lane] >= len(lanes[lane]):
                continue
            op = lanes[lane][heads[lane]]
            takes = [name for name, _ in op.take]
            may_take = all(queues[name][granted[name]] == op.id and free[name] > 0 for name in takes)
            if may_take and all(done[dep] for dep in op.deps):
                for name in takes:
                    free[name] -= 1
                    granted[name] += 1
                running[lane] = (op, now, alone_seconds(op, hardware))
                heads[lane] += 1
        rates = {lane: _rate(lane, running, hardware) for lane in running}
        passed = min(left / rates[lane] for lane, (_, _, left) in running.items())
        now += passed
        for lane, (op, start, left) in list(running.items()):
            left -= passed * rates[lane]
            if left > 1e-12:
                running[lane] = (op, start, left)
                continue
            del running[lane]
            done[op.id] = True
            for lease in op.give:
                free[pool_of[lease]] += 1
            spans.append(Span(op.id, op.kind, op.lane, op.unit, op.group, start, now, op.amount))
    return Trace(tuple(spans), now)


def _rate(lane: str, running: dict[str, tuple[Op, float, float]], hardware: HardwareSpec) -> float:
    if lane in _DISK and all(other in running for other in _DISK):
        return hardware.disk_together
    if hardware.cores_shared and lane in _CORES:
        return 1.0 / sum(other in _CORES for other in running)
    return 1.0


def step_seconds(plan: Plan, hardware: HardwareSpec) -> tuple[float, str]:
    """Predicted seconds of an optimizer step, accumulation included, and the lane that is busiest."""
    seconds, busy = 0.0, dict.fromkeys(LANES, 0.0)
    rounds = [plan.round_ops(index) for index in range(plan.placement.accumulation)]
    traces = {id(ops): simulate(ops, plan.pools, hardware) for ops in {id(ops): ops for ops in rounds}.values()}
    for ops in rounds:
        seconds += traces[id(ops)].seconds
        for lane, lane_seconds in traces[id(ops)].busy_s().items():
            busy[lane] += lane_seconds
    return seconds, max(busy, key=lambda lane: busy[lane])
