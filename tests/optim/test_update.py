"""The native kernel, the plain path and torch.optim.AdamW do the same arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway import native
from spillway.optim import update
from spillway.optim.update import Hyper, StateRange, clip_scale, join_master, split_master, sum_squares

SIZE = 64 * 1024  # whole vectors: PyTorch's own kernel rounds the last few elements of others differently


def gradients(steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Huge, tiny and denormal ones among them."""
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (torch.rand(SIZE, generator=generator) * 30 - 25)
    return [(torch.randn(SIZE, generator=generator) * scale).to(dtype) for _ in range(steps)]


def ours(weight: torch.Tensor, grads: list[torch.Tensor], split: bool, scale: float = 1.0) -> torch.Tensor:
    low = None
    if split:
        weight, low = split_master(weight)
    else:
        weight = weight.clone()
    m, v = torch.zeros(SIZE), torch.zeros(SIZE)
    for step, grad in enumerate(grads, 1):
        update.update_range(StateRange(weight, low, m, v, grad), Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, step), scale, 2)
    return weight if low is None else join_master(weight, low)


def theirs(weight: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1, fused=True)
    for grad in grads:
        param.grad = grad.float()
        optimizer.step()
    return param.detach()


needs_native = pytest.mark.skipif(not native.available(), reason=f"no native library: {native.load_problem()}")


@needs_native
@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_fifty_native_steps_give_the_bits_of_torch_adamw(split: bool, dtype: torch.dtype) -> None:
    weight, grads = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)), gradients(50, dtype)
    assert torch.equal(ours(weight, grads, split), theirs(weight, grads))


@pytest.mark.parametrize("split", (False, True))
def test_the_plain_path_agrees_to_rounding(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    weight, grads = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)), gradients(20, torch.float32)
    torch.testing.assert_close(ours(weight, grads, split), theirs(weight, grads), rtol=1e-5, atol=1e-6)


@needs_native
@pytest.mark.parametrize("size", (0, 1, 7, 8, 65535, 65537, 200001))
def test_any_size_and_number_of_threads_gives_the_same_bits(size: int) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for threads in (1, 2, 5):
        weight, low = split_master(torch.ones(size))
        m, v = torch.zeros(size), torch.zeros(size)
        update.update_range(StateRange(weight, low, m, v, grad), Hyper(1e-2, 0.9, 0.99, 1e-8, 0.0, 1), 0.5, threads)
        results.append((weight, low, m, v, sum_squares(grad, threads)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:4], other[:4], strict=True))
        assert results[0][4] == other[4]
    assert results[0][4] == pytest.approx(float(grad.double().square().sum()), rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_split_master_gives_back_every_bit(bits: int) -> None:
    value = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    if value.isnan().any():
        return
    weight, low = split_master(value)
    assert torch.equal(join_master(weight, low).view(torch.int32), value.view(torch.int32))
    if value.abs() < 3e38:
        nearest = value.to(torch.bfloat16)
        tie = (bits & 0xFFFF) == 0x8000
        assert tie or torch.equal(weight, nearest)


def test_the_clip_factor_is_that_of_torch() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([3.0, 4.0, 12.0])
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    torch.testing.assert_close(param.grad, torch.tensor([3.0, 4.0, 12.0]) * clip_scale(13.0, 1.0))
    assert clip_scale(0.5, 1.0) == 1.0 and clip_scale(9.0, None) == 1.0
