"""Which devices are here, and what they do slowly."""

import torch

from spillway.spec.errors import UsageError


def refuse_missing(device: str) -> None:
    """Raise UsageError for a device that is not here."""
    if not device.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise UsageError(
            "there is no CUDA device PyTorch can use here: choose device='cpu', or install a CUDA build of PyTorch"
        )
    number = device.partition(":")[2]
    if number and int(number) >= torch.cuda.device_count():
        raise UsageError(f"there is no device '{device}' here: cuda:0 is the first of {torch.cuda.device_count()}")


def has_slow_16_bits() -> bool:
    """Whether PyTorch multiplies 16-bit numbers one by one on this processor, as on x86 before AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"
