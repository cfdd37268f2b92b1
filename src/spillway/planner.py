"""What this machine may give to one model, and the plan for it."""

import math
import warnings
from dataclasses import replace

from spillway.hardware.calibration import as_seen
from spillway.hardware.limits import free_host_bytes, process_bytes
from spillway.hardware.probe import measure
from spillway.model.units import Unit
from spillway.plan.make import make_plan
from spillway.plan.request import PlanRequest
from spillway.runtime.device import Device
from spillway.spec.errors import BudgetWarning, UsageError
from spillway.spec.hardware import DEVICE_SHARE, Budget, HardwareSpec, asks_too_much, device_bytes, host_bytes
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan, TierPeaks
from spillway.spec.sizes import format_size, parse_size
from spillway.spec.state import StateFormat
from spillway.store.disk import Geometry, free_on
from spillway.store.layout import prevailing_dtype

# What libraries, threads and the user's data still take after the plan was made.
PROCESS_RESERVE = 80 << 20
_LEAST_ROOM = 16 << 20


def make_budget(
    device: Device,
    geometry: Geometry | None,
    device_memory: str | int | None,
    host_memory: str | int | None,
    disk_memory: str | int | None,
    counted_bytes: int = 0,
) -> Budget:
    """Bytes of each tier that may be used: what the user gave, otherwise most of what is free. `counted_bytes`
    of the process are weights that will have moved into the store."""
    process = max(process_bytes() - counted_bytes, 0) + PROCESS_RESERVE
    given, most = _size(host_memory, "host_memory"), free_host_bytes() + process_bytes()
    host = host_bytes(most, given)
    if given is not None and asks_too_much(most, given):
        warnings.warn(
            f"host_memory is {format_size(given)} and {format_size(most)} are free on this machine: "
            f"{format_size(host)} are used",
            BudgetWarning,
            stacklevel=3,
        )
    have_device, free = _size(device_memory, "device_memory"), device.free_bytes()
    if free is None:
        have_device = host if have_device is None else min(have_device, host)
    else:
        usable = int(DEVICE_SHARE * free)
        if have_device is not None and have_device > usable:
            warnings.warn(
                f"device_memory is {format_size(have_device)} and {format_size(free)} are free on the device: "
                f"{format_size(usable)} are used",
                BudgetWarning,
                stacklevel=3,
            )
        have_device = device_bytes(free, have_device)
    disk = _size(disk_memory, "disk_memory")
    free_disk = 0
    if geometry is not None:
        free_disk = free_on(geometry)
    return Budget(have_device, host, free_disk if disk is None else min(disk, free_disk), process)


def _size(text: str | int | None, name: str) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error


class Planner:
    """Measures the machine, then plans any profile."""

    def __init__(
        self,
        device: Device,
        units: tuple[Unit, ...],
        geometry: Geometry | None,
        budget: Budget,
        request: PlanRequest,
        form: StateFormat,
    ) -> None:
        self._device = device
        places = [place for unit in units for place in unit.layout.places]
        self._dtype = prevailing_dtype((place.dtype, place.numel) for place in places)  # adapters may have another
        self._geometry = geometry
        self._budget = budget
        self._request = request
        self._form = form
        self._placed: Plan | None = None
        self._probed: HardwareSpec | None = None
        self._probed_rows = 0
        self._hardware: HardwareSpec | None = None

    @property
    def probed(self) -> HardwareSpec:
        """This machine as it was measured, whatever earlier runs showed."""
        if self._probed is None:
            raise UsageError("nothing is planned before the first batch (or the example) is known")
        return self._probed

    @property
    def hardware(self) -> HardwareSpec:
        """What the last plan was made for."""
        if self._hardware is None:
            paths = () if self._geometry is None else self._geometry.directories
            self._hardware = as_seen(self.probed, paths)
        return self._hardware

    def _measure(self, profile: ModelProfile, resting: TierPeaks) -> HardwareSpec:
        """This machine, measured at the width of the model's heaviest unit and the length of its calls; again where
        the first plan was made without calls. `resting`: what is taken of the budget already."""
        forwards = [call for call in profile.calls if call.kind == "FORWARD"]
        rows = profile.tokens // max((call.chunks for call in forwards), default=1)
        if self._probed is None or (rows and not self._probed_rows):
            # A transformer block of width h has about 12 h^2 parameters; an embedding may have more.
            heaviest = max(forwards, key=lambda call: call.flops, default=None)
            hidden = 0 if heaviest is None else math.isqrt(profile.units[heaviest.unit].num_params // 12)
            self._probed_rows, self._hardware = rows, None
            self._probed = measure(
                self._device.torch_device,
                self._dtype,
                self._geometry,
                rows,
                hidden,
                self._form,
                max(self._budget.host_bytes - resting.host, _LEAST_ROOM),
                max(self._budget.device_bytes - resting.device, _LEAST_ROOM),
            )
        return self.hardware

    def __call__(self, profile: ModelProfile, is_open: bool) -> Plan:
        """The plan; once weights rest somewhere they stay there."""
        placed = self._placed if is_open else None
        request = replace(self._request, fixed=None if placed is None else placed.placement)
        resting = TierPeaks(0, self._budget.process_bytes, 0) if placed is None else placed.peaks
        plan = make_plan(profile, self._measure(profile, resting), self._budget, request)
        if not is_open:
            self._placed = plan
        return plan
