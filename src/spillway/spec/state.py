"""What an optimizer keeps of every parameter, and how wide."""

from dataclasses import dataclass

MOMENTS = ("float32", "bfloat16", "8bit")
CLIP_BY = ("norm", "unit", "value")  # what gradients are clipped by: all together, unit by unit, each element
BLOCK = 64  # elements that share a scale where moments have 8 bits


@dataclass(frozen=True, slots=True)
class StateFormat:
    """The arrays beside the weights. `low_bits`: what a bfloat16 weight's fp32 master has below it is kept whole (16),
    or its upper 8 bits with stochastic rounding."""

    rule: str = "adamw"
    moments: str = "float32"
    low_bits: int = 16

    @property
    def has_v(self) -> bool:
        """Whether there is a second moment."""
        return self.rule == "adamw"


EXACT = StateFormat()
