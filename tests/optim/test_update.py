"""The native kernel, the plain path and torch.optim.AdamW do the same arithmetic."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway import native
from spillway.optim import narrow, update
from spillway.optim.clip import clip_scale
from spillway.optim.update import Hyper, StateRange, join_master, split_master, sum_squares
from spillway.spec.state import EXACT, MOMENTS, StateFormat

SIZE = 64 * 1024  # whole vectors: PyTorch's own kernel rounds the last few elements of others differently


def gradients(steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Huge, tiny and denormal ones among them."""
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (torch.rand(SIZE, generator=generator) * 30 - 25)
    made = [torch.randn(SIZE, generator=generator) * scale for _ in range(steps)]
    return [grad.clamp(-6e4, 6e4).to(dtype) for grad in made]


def ours(weight: torch.Tensor, grads: list[torch.Tensor], split: bool, scale: float = 1.0) -> torch.Tensor:
    low = None
    if split:
        weight, low = split_master(weight)
    else:
        weight = weight.clone()
    m, v = torch.zeros(weight.numel()), torch.zeros(weight.numel())
    for step, grad in enumerate(grads, 1):
        update.update_range(
            StateRange(EXACT, 0, weight, low, m, v, None, grad), Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, step), scale, 2
        )
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
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
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
        update.update_range(
            StateRange(EXACT, 0, weight, low, m, v, None, grad), Hyper(1e-2, 0.9, 0.99, 1e-8, 0.0, 1), 0.5, threads
        )
        results.append((weight, low, m, v, sum_squares(grad, threads)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:4], other[:4], strict=True))
        assert results[0][4] == other[4]
    assert results[0][4] == pytest.approx(float(grad.double().square().sum()), rel=1e-12)


@needs_native
def test_float16_weights_are_the_rounded_masters_and_these_have_the_bits_of_torch_adamw() -> None:
    generator = torch.Generator().manual_seed(4)
    master = torch.randn(SIZE, generator=generator) * 10 ** (torch.rand(SIZE, generator=generator) * 14 - 9)
    grads = [(torch.randn(SIZE, generator=generator) * 1e-2).half() for _ in range(20)]
    low, weight, m, v = master.clone(), master.half(), torch.zeros(SIZE), torch.zeros(SIZE)
    for step, grad in enumerate(grads, 1):
        hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, step)
        update.update_range(StateRange(EXACT, 0, weight, low, m, v, None, grad), hyper, 1.0, 2)
        assert torch.equal(weight.view(torch.int16), low.half().view(torch.int16))
    assert torch.equal(low, theirs(master, grads))
    assert weight.isinf().any() and (weight.abs() < 6e-5).any()


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


@needs_native
def test_a_thousand_native_steps_give_the_bits_of_torch_adamw() -> None:
    weight = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(3)
    scale = 10 ** (torch.rand(4096, generator=generator) * 80 - 45)  # huge, tiny and denormal
    grads = [torch.randn(4096, generator=generator) * scale for _ in range(1000)]
    grads = [grad.clamp(-1e18, 1e18) for grad in grads]
    assert torch.equal(ours(weight, grads, True), theirs(weight, grads))


FORMS = [
    StateFormat(rule, moments, bits) for rule in ("adamw", "lion", "sgd") for moments in MOMENTS for bits in (16, 8)
]


def start(form: StateFormat, weight: torch.Tensor) -> StateRange:
    """Fresh states of bfloat16 weights."""
    upper, low = split_master(weight.clone())
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}[form.moments]
    size = weight.numel()
    return StateRange(
        form,
        0,
        upper,
        low if form.low_bits == 16 else ((low.int() >> 8) & 0xFF).to(torch.uint8),
        torch.zeros(size, dtype=kind),
        torch.zeros(size, dtype=kind) if form.has_v else None,
        torch.zeros(size // 32, dtype=torch.uint8) if form.moments == "8bit" else None,
        torch.zeros(size),
    )


def steps(form: StateFormat, weight: torch.Tensor, grads: list[torch.Tensor], threads: int = 2) -> StateRange:
    state = start(form, weight)
    for step, grad in enumerate(grads, 1):
        state = replace(state, grad=grad)
        update.update_range(state, Hyper(1e-3, 0.9, 0.99, 1e-8, 0.1, step), 0.5, threads)
    return state


@needs_native
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_native_and_plain_path_agree_whatever_is_kept(form: StateFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(4096, generator=generator)
    grads = [torch.randn(4096, generator=generator).bfloat16() for _ in range(4)]
    fast = steps(form, weight, grads)
    monkeypatch.setattr(native, "available", lambda: False)
    slow = steps(form, weight, grads)
    ours, theirs = join_master(fast.weight, fast.low), join_master(slow.weight, slow.low)
    # A product rounded otherwise may tip a stochastic rounding, or for Lion a sign, here and there.
    close = torch.isclose(ours, theirs, rtol=2e-5, atol=2e-6)
    assert close.float().mean() > 0.995, f"{(~close).sum()} of 4096 differ"


@needs_native
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cutting_a_unit_anywhere_and_any_number_of_threads_gives_the_same_bits(form: StateFormat) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, grad = torch.randn(200_000 // 64 * 64, generator=generator), torch.randn(200_000 // 64 * 64)
    results = []
    for threads, cuts in ((1, [0]), (3, [0]), (2, [0, 64 * 700, 64 * 1501])):
        state = replace(start(form, weight), grad=grad)
        for step in (1, 2):
            for begin, end in itertools.pairwise([*cuts, weight.numel()]):
                part = state.narrow(begin, end - begin)
                update.update_range(part, Hyper(1e-3, 0.9, 0.99, 1e-8, 0.1, step), 1.0, threads)
        results.append(state)
    for other in results[1:]:
        for name in ("weight", "low", "m", "v", "scales"):
            first, second = getattr(results[0], name), getattr(other, name)
            assert (first is None and second is None) or torch.equal(first, second), name


@needs_native
def test_sgd_and_torch_sgd_take_the_same_steps() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(4096, generator=generator)
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([param], lr=1e-2, momentum=0.9, weight_decay=0.1)
    mine, m = weight.clone(), torch.zeros(4096)
    for step in range(1, 21):
        grad = torch.randn(4096, generator=generator)
        param.grad = grad
        optimizer.step()
        state = StateRange(StateFormat("sgd"), 0, mine, None, m, None, None, grad)
        update.update_range(state, Hyper(1e-2, 0.9, 0.0, 0.0, 0.1, step), 1.0, 1)
    torch.testing.assert_close(mine, param.detach(), rtol=1e-6, atol=1e-7)


# Small floating point numbers below a shared exponent #


def values(seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64 * 64, generator=generator) * 10 ** (torch.rand(64 * 64, generator=generator) * spread - 20)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.floats(0, 12))
def test_eight_bits_are_never_further_off_than_they_promise(seed: int, spread: float) -> None:
    value, random = values(seed, spread), narrow.hash_bits(0, 64 * 64, seed, torch.device("cpu"))
    for kind, exponents, floor in (
        (value, narrow.M_EXPONENTS, 2**-14),
        (value.square() * 1e16, narrow.V_EXPONENTS, 2**-30),
    ):
        codes, scales = narrow.encode(kind, random, exponents)
        error = (narrow.decode(codes, scales, exponents) - kind).abs().view(-1, 64)
        most = kind.abs().view(-1, 64).amax(1, keepdim=True)
        assert (error <= torch.maximum(kind.abs().view(-1, 64) / 8, floor * most)).all()


def test_eight_bits_are_right_on_average() -> None:
    value = values(1, 3).abs()
    total = torch.zeros_like(value, dtype=torch.float64)
    for seed in range(2000):
        random = narrow.hash_bits(0, value.numel(), seed * 7919, torch.device("cpu"))
        total += narrow.decode(*narrow.encode(value, random, narrow.V_EXPONENTS), narrow.V_EXPONENTS)
    # The error of a mean of 2,000 roundings by at most an eighth.
    relative = (total / 2000 / value - 1).abs()
    assert relative.max() < 0.125 / 2000**0.5 * 3, relative.max()


@needs_native
def test_the_kernel_writes_the_codes_that_the_formula_gives() -> None:
    grad = values(2, 6) * 1e18
    random = narrow.hash_bits(0, grad.numel(), Hyper(0, 0, 0, 0, 0, 5).seed, torch.device("cpu"))
    state = replace(start(StateFormat("adamw", "8bit", 8), torch.ones(grad.numel())), grad=grad)
    update.update_range(state, Hyper(0.0, 0.0, 0.0, 1e-8, 0.0, 5), 1.0, 1)  # no memory: m is g, v its square
    codes, scales = narrow.encode(grad, random, narrow.M_EXPONENTS)
    assert torch.equal(state.m, codes) and torch.equal(state.scales[0::2], scales)
    codes, scales = narrow.encode(grad.square(), random >> 12, narrow.V_EXPONENTS)
    assert torch.equal(state.v, codes) and torch.equal(state.scales[1::2], scales)
    state = replace(start(StateFormat("sgd", "bfloat16", 8), torch.ones(grad.numel())), grad=grad)
    update.update_range(state, Hyper(2.0**-9, 0.0, 0.0, 0.0, 0.0, 5), 1.0, 1)
    assert torch.equal(state.m, narrow.round_to_16(grad, random))
    master = (1 - grad.double() * 2.0**-9).float()
    weight, low = narrow.round_master_to_24(master, narrow.again(random))
    assert torch.equal(state.weight, weight) and torch.equal(state.low, low)


def test_an_average_that_moves_by_a_thousandth_a_step_still_moves() -> None:
    """Rounded to nearest it would stand still for good."""
    grads = [torch.full((256,), 1e-3)] * 2000
    for moments in ("bfloat16", "8bit"):
        state = start(StateFormat("adamw", moments, 16), torch.zeros(256))
        for step, grad in enumerate(grads, 1):
            update.update_range(replace(state, grad=grad), Hyper(0.0, 0.9, 0.999, 1e-8, 0.0, step), 1.0, 1)
        v = state.v.float() if state.scales is None else narrow.decode(state.v, state.scales[1::2], narrow.V_EXPONENTS)
        expected = 1e-6 * (1 - 0.999**2000)
        assert float(v.mean()) == pytest.approx(expected, rel=0.05), moments
