"""Known parts, and machines put together from them: `rtx4090+4x990pro+128GB`."""

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from spillway.spec.errors import UsageError
from spillway.spec.hardware import UPDATE_BYTES, HardwareSpec
from spillway.spec.machine import Drive, Gpu, Machine, Striped, striped
from spillway.spec.sizes import parse_size

_GB, _TB = 10**9, 10**12
_T = 10**12

# What a block reaches of the maker's figure. Consumer cards are held to half their tensor rate with fp32 accumulation
# and reach almost all of that (Fuyou: 156 of 165 TFLOP/s in training on a 4090); a data centre card reaches about two
# thirds (Fuyou: 202 of 312 on an A100).
_CONSUMER_SHARE = 0.94
# Makers' dense 16-bit figures with fp32 accumulation, memory bandwidths, and float32 rates without tensor cores; prices
# at launch, or of the papers; 0 where neither is known.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "rtx3090",
            24 << 30,
            71 * _T,
            4,
            1499,
            "NVIDIA Ampere GA102 whitepaper",
            936 * _GB,
            35.6 * _T,
            _CONSUMER_SHARE,
        ),
        Gpu("rtx4080", 16 << 30, 97.5 * _T, 4, 1199, "NVIDIA Ada whitepaper", 717 * _GB, 48.7 * _T, _CONSUMER_SHARE),
        Gpu(
            "rtx4090",
            24 << 30,
            165.2 * _T,
            4,
            1600,
            "NVIDIA Ada whitepaper; price as in Fuyou",
            1008 * _GB,
            82.6 * _T,
            _CONSUMER_SHARE,
        ),
        Gpu(
            "rtx5090",
            32 << 30,
            209.5 * _T,
            5,
            1999,
            "NVIDIA RTX Blackwell whitepaper",
            1792 * _GB,
            104.8 * _T,
            _CONSUMER_SHARE,
        ),
        Gpu("rtxpro6000", 96 << 30, 503.8 * _T, 5, 8565, "NVIDIA RTX PRO Blackwell whitepaper", 1792 * _GB, 125 * _T),
        Gpu("l40s", 48 << 30, 362 * _T, 4, 0, "NVIDIA L40S datasheet", 864 * _GB, 91.6 * _T),
        Gpu("v100", 32 << 30, 125 * _T, 3, 0, "NVIDIA V100 datasheet", 900 * _GB, 15.7 * _T),
        Gpu("a100-40", 40 << 30, 312 * _T, 4, 0, "NVIDIA A100 datasheet", 1555 * _GB, 19.5 * _T),
        Gpu("a100-80", 80 << 30, 312 * _T, 4, 14177, "NVIDIA A100 datasheet; price as in Fuyou", 1935 * _GB, 19.5 * _T),
        Gpu("h100", 80 << 30, 989 * _T, 5, 0, "NVIDIA H100 SXM datasheet", 3350 * _GB, 67 * _T),
        Gpu("h200", 139 << 30, 989 * _T, 5, 0, "NVIDIA H200 datasheet; memory as of CUDA", 4800 * _GB, 67 * _T),
        Gpu(
            "b200",
            178 << 30,
            2250 * _T,
            5,
            0,
            "NVIDIA HGX B200 datasheet; memory as of CUDA",
            8000 * _GB,
            75 * _T,
        ),
    )
}
# Makers' sequential figures: a consumer drive writes slower once its cache is full, so probe a real one.
DRIVES = {
    drive.name: drive
    for drive in (
        Drive("980pro", 2 * _TB, 7.0e9, 5.1e9, 1200 * _TB, 0, "Samsung 980 PRO 2 TB datasheet"),
        Drive("990pro", 2 * _TB, 7.45e9, 6.9e9, 1200 * _TB, 289, "Samsung 990 PRO 2 TB datasheet"),
        Drive("sn850x", 2 * _TB, 7.3e9, 6.6e9, 1200 * _TB, 0, "WD_BLACK SN850X 2 TB datasheet"),
        Drive("t705", 2 * _TB, 14.5e9, 12.7e9, 1200 * _TB, 0, "Crucial T705 2 TB datasheet"),
        Drive("p5510", 3840 * _GB, 6.5e9, 3.4e9, 7000 * _TB, 308, "Solidigm D7-P5510 3.84 TB brief; price as in Fuyou"),
    )
}
# Bytes per second each way over 16 lanes, after protocol overhead (about 0.8 of the raw rate).
PCIE = {3: 12.5e9, 4: 25e9, 5: 50e9}
# What one pass over host memory moves: two channels of DDR5, or a server's eight of DDR4.
DESKTOP_HOST, SERVER_HOST = 60e9, 150e9
DEFAULT_HOST_GB = 64
_MOST_OF_ONE = 1000

# What of a rate is left while what shares the lane runs, too.
_SHARES = ("disk_together", "link_together", "cores_together")

# The papers' servers, by their parts.
SERVERS = {
    "lohan-4090": "rtx4090+12xp5510+768GB+server",
    "lohan-3090": "rtx3090+12xp5510+768GB+server",
    "lohan-4080": "rtx4080+12xp5510+768GB+server",
    "fuyou-a100": "a100-80+12xp5510+768GB+server",
    "stronghold-v100": "v100+p5510+768GB+server",
}


def find_machine(text: str) -> Machine:
    """A machine by name, by its parts (`rtx4090+4x990pro+128GB`, with `server` for eight memory channels and `pcie3`
    for another link), or from a TOML file.

    Raises UsageError with near names for a part there is not, and for a malformed file.
    """
    if text.endswith(".toml"):
        return _from_file(Path(text))
    parts = [part for given in text.split("+") for part in SERVERS.get(given.strip().lower(), given).split("+")]
    gpu: Gpu | None = None
    drives: list[Drive] = []
    host_bytes, host_rate, generation = 0, DESKTOP_HOST, 0
    for part in parts:
        count, name = _counted(part.strip().lower().replace(" ", ""))
        if not name:
            raise UsageError(f"'{text}' has an empty part: write them as in rtx4090+2x990pro+128GB")
        if not 1 <= count <= _MOST_OF_ONE:
            raise UsageError(f"'{part}': the count must be from 1 to {_MOST_OF_ONE}; leave the part out for none")
        if name in GPUS:
            if gpu is not None or count > 1:
                raise UsageError(f"'{text}' names more than one GPU, and Spillway plans for one: leave the others out")
            gpu = GPUS[name]
        elif name in DRIVES:
            drives += [DRIVES[name]] * count
        elif name == "server":
            host_rate = SERVER_HOST
        elif re.fullmatch(r"pcie[345]", name):
            generation = int(name[-1])
        elif (size := _size(name)) is not None:
            if size <= 0:
                raise UsageError(f"'{part}': memory must be more than 0; leave it out for {DEFAULT_HOST_GB}GB")
            host_bytes += count * size
        else:
            raise UsageError(_unknown(part))
    if gpu is None:
        raise UsageError(f"'{text}' names no GPU: begin with one of {', '.join(GPUS)}")
    return build(
        text,
        gpu,
        tuple(drives),
        host_bytes or DEFAULT_HOST_GB * _GB,
        host_rate,
        min(generation or gpu.pcie_generation, gpu.pcie_generation),
    )


def build(
    name: str, gpu: Gpu, drives: tuple[Drive, ...], host_bytes: int, host_rate: float, pcie_generation: int
) -> Machine:
    """A machine of these parts, with the rates that follow from them: an update runs at about what memory gives."""
    link, store = PCIE[pcie_generation], striped(drives) if drives else Striped(0, 1.0, 1.0, 0.0)
    hardware = HardwareSpec(
        "cuda",
        gpu.block_share * gpu.peak_flops_per_s,
        link,
        link,
        store.read_bytes_per_s,
        store.write_bytes_per_s,
        host_rate / UPDATE_BYTES,
        host_rate,
        device_update_params_per_s=gpu.memory_bytes_per_s / UPDATE_BYTES,
    )
    price = gpu.price + sum(drive.price for drive in drives)
    known = gpu.price and all(drive.price for drive in drives)
    return Machine(
        name,
        hardware,
        gpu.memory_bytes,
        host_bytes,
        store.capacity_bytes,
        gpu.peak_flops_per_s,
        gpu.float32_flops_per_s / gpu.peak_flops_per_s,
        drives,
        price if known else 0.0,
    )


def _counted(part: str) -> tuple[int, str]:
    match = re.fullmatch(r"(\d+)x(.+)", part)
    return (int(match[1]), match[2]) if match else (1, part)


def _size(text: str) -> int | None:
    if not text or not text[0].isdigit() or text.isdigit():
        return None
    try:
        return parse_size(text)
    except ValueError:
        return None


def _unknown(part: str) -> str:
    if part.isdigit():
        return f"'{part}' in the hardware has no unit: write memory as {part}GB"
    known = [*GPUS, *DRIVES, *SERVERS, *(f"pcie{generation}" for generation in PCIE), "server"]
    begun = [name for name in known if name.startswith(part.lower())]
    near = begun or difflib.get_close_matches(part.lower(), known, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    return f"there is no '{part}' in the catalogue: {hint}"


def _from_file(path: Path) -> Machine:
    """`base` (parts as above) and any field of HardwareSpec, and device, host and disk memory as sizes."""
    try:
        values: Mapping[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"the hardware file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the hardware file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the hardware file {path} is malformed: {' '.join(str(error).split())}") from error
    rates = {field.name for field in fields(HardwareSpec)}
    sizes = {"device_memory": "device_bytes", "host_memory": "host_bytes", "disk_memory": "disk_bytes"}
    base = str(values.get("base", "rtx4090+990pro+64GB"))
    if base.endswith(".toml"):
        raise UsageError(f"the hardware file {path}: base names parts, not another file")
    machine = find_machine(base)
    hardware: dict[str, Any] = {}
    changed: dict[str, Any] = {"name": path.stem}
    for name, value in values.items():
        if name in rates:
            _refuse_senseless(path, name, value, type(getattr(machine.hardware, name)))
            hardware[name] = value
        elif name in sizes:
            try:
                changed[sizes[name]] = parse_size(value)
            except ValueError as error:
                raise UsageError(f"the hardware file {path}: {name}: {error}") from error
        elif name != "base":
            near = difflib.get_close_matches(name, [*rates, *sizes, "base"], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"the hardware file {path} sets '{name}', which is not known{hint}")
    if changed.get("disk_bytes") and not machine.drives:
        machine = _with_own_drive(machine, path, hardware, changed["disk_bytes"])
    if hardware.get("device") == "cpu":
        machine = _without_gpu(machine, path, hardware)
    return replace(machine, hardware=replace(machine.hardware, **hardware), **changed)


def _refuse_senseless(path: Path, name: str, value: Any, kind: type) -> None:
    """Raises UsageError for what no rate, switch or device can be."""
    if kind is float and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise UsageError(f"the hardware file {path}: {name} must be a number, not {value!r}")
    if kind is float and not 0 < value < math.inf:
        raise UsageError(f"the hardware file {path}: {name} must be more than 0, not {value}")
    if name in _SHARES and value > 1:
        raise UsageError(f"the hardware file {path}: {name} is a share of a rate, at most 1, not {value}")
    if kind is bool and not isinstance(value, bool):
        raise UsageError(f"the hardware file {path}: {name} must be true or false, not {value!r}")
    if kind is str and value not in ("cuda", "cpu"):
        raise UsageError(f"the hardware file {path}: {name} must be 'cuda' or 'cpu', not {value!r}")


def _with_own_drive(machine: Machine, path: Path, rates: Mapping[str, Any], capacity_bytes: int) -> Machine:
    """A machine whose parts have no drive, with the one that the file tells of. Raises UsageError where it does not."""
    if not {"read_bytes_per_s", "write_bytes_per_s"} <= rates.keys():
        raise UsageError(
            f"the hardware file {path} sets disk_memory, and its base has no drive: name one there, or set "
            f"read_bytes_per_s and write_bytes_per_s"
        )
    drive = Drive(path.stem, capacity_bytes, rates["read_bytes_per_s"], rates["write_bytes_per_s"], 0.0, 0.0, str(path))
    return replace(machine, drives=(drive,), price=0.0)


def _without_gpu(machine: Machine, path: Path, rates: Mapping[str, Any]) -> Machine:
    """The base without what is its GPU's: the CPU computes, and what goes to the device goes from host memory to host
    memory. Raises UsageError where nothing says how fast it computes."""
    if "device_flops_per_s" not in rates:
        raise UsageError(
            f"the hardware file {path}: device 'cpu' needs device_flops_per_s, for the base's is its GPU's"
        )
    base = machine.hardware
    copies = rates.get("host_bytes_per_s", base.host_bytes_per_s) / 2
    cores = replace(
        base,
        upload_bytes_per_s=copies,
        download_bytes_per_s=copies,
        device_update_params_per_s=rates.get("update_params_per_s", base.update_params_per_s),
        cores_shared=True,
    )
    return replace(machine, hardware=cores, peak_flops_per_s=0.0, float32_share=1.0, price=0.0)
