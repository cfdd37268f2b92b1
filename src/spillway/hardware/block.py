"""A transformer block as a step computes it, to measure a device's FLOP/s with."""

import torch

from spillway.hardware.timing import finish


def step_flops(rows: int, hidden: int) -> int:
    """FLOPs in the matrix products of a block's step: two forwards, and a backward of twice as much."""
    weights = (3 + 1 + 6 + 3) * hidden * hidden
    return 4 * (2 * rows * weights + 4 * rows * rows * hidden)


class Block:
    """A transformer block as a step computes it, written as in transformers: norms and rotations of single operators.
    Matrix products and the whole square of attention count as FLOPs, as in the model's profile."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rows: int, hidden: int) -> None:
        # A generator of its own: what the user seeded must not move.
        source = torch.Generator(device).manual_seed(0)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=source).to(dtype)

        self._device, self._rows, self._heads = device, rows, hidden // 64
        self._x = made(rows, hidden).requires_grad_()
        self._turns = made(rows, 64), made(rows, 64)
        shapes = [(3 * hidden, hidden), (hidden, hidden), (6 * hidden, hidden), (hidden, 3 * hidden)]
        self._weights = [made(*shape).requires_grad_() for shape in shapes]
        self._sums = [torch.empty_like(weight) for weight in self._weights]
        self.flops = step_flops(rows, hidden)

    def step(self) -> None:
        """Forward, and recomputation with backward, whose gradients go to where they are summed."""
        with torch.no_grad():
            self._forward()
        with torch.enable_grad():
            _, *grads = torch.autograd.grad(self._forward().sum(), [self._x, *self._weights])
        for total, grad in zip(self._sums, grads, strict=True):
            total.copy_(grad)
        finish(self._device)

    def _forward(self) -> torch.Tensor:
        functional, (project, back, up, down) = torch.nn.functional, self._weights
        parts = functional.linear(_norm(self._x), project).chunk(3, -1)
        query, key, value = (part.view(1, self._rows, self._heads, 64).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(self._turn(query), self._turn(key), value, is_causal=True)
        middle = self._x + functional.linear(mixed.transpose(1, 2).reshape(self._x.shape), back)
        gate, wide = functional.linear(_norm(middle), up).chunk(2, -1)
        return middle + functional.linear(functional.silu(gate) * wide, down)

    def _turn(self, part: torch.Tensor) -> torch.Tensor:
        """Rotary positions."""
        first, second = part.chunk(2, -1)
        return part * self._turns[0] + torch.cat((-second, first), -1) * self._turns[1]


def _norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
