"""The native kernel, the plain path and torch.optim.AdamW do the same arithmetic."""

import itertools
import os
import subprocess
import sys
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
@pytest.mark.parametrize(("dtype", "most"), ((torch.float32, 1e18), (torch.bfloat16, 1e18), (torch.float16, 6e4)))
def test_a_thousand_native_steps_give_the_bits_of_torch_adamw(dtype: torch.dtype, most: float) -> None:
    weight = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(3)
    scale = 10 ** (torch.rand(4096, generator=generator) * 80 - 45)  # huge, tiny and denormal
    grads = [torch.randn(4096, generator=generator) * scale for _ in range(1000)]
    grads = [grad.clamp(-most, most).to(dtype) for grad in grads]
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
    value, random = values(seed, spread), narrow.random_of_blocks(0, 64 * 64, seed, torch.device("cpu"))
    for kind, bits, code, floor in (
        (value, random.m, narrow.M, 2**-14),
        (value.square() * 1e16, random.v, narrow.V, 2**-30),
    ):
        codes, scales = narrow.encode(kind, bits, code)
        error = (narrow.decode(codes, scales, code) - kind).abs().view(-1, 64)
        most = kind.abs().view(-1, 64).amax(1, keepdim=True)
        assert (error <= (kind.abs().view(-1, 64) + floor * most) / 8).all()


def test_eight_bits_are_right_on_average() -> None:
    value = values(1, 3).abs()
    totals = torch.zeros(2, value.numel(), dtype=torch.float64)
    for seed in range(2000):
        random = narrow.random_of_blocks(0, value.numel(), seed * 7919, torch.device("cpu"))
        totals[0] += narrow.decode(*narrow.encode(value, random.m, narrow.M), narrow.M)
        totals[1] += narrow.decode(*narrow.encode(value, random.v, narrow.V), narrow.V)
    # The error of a mean of 2,000 roundings by at most an eighth, of small values by one of the spacing near zero.
    most = value.view(-1, 64).amax(1, keepdim=True).expand(-1, 64).flatten()
    for total, floor in zip(totals, (2.0**-14, 2.0**-30), strict=True):
        relative = (total / 2000 - value).abs() / (value + floor * most)
        assert relative.max() < 0.125 / 2000**0.5 * 3, relative.max()


def test_what_is_rounded_up_and_down_in_a_block_nearly_cancels() -> None:
    """Its random bits are spread evenly: the sum of 64 equal numbers is off by less than independent bits make it."""
    value = torch.full((64 * 64,), 1.3)
    random = narrow.random_of_blocks(0, value.numel(), 5, torch.device("cpu"))
    sums = narrow.decode(*narrow.encode(value, random.v, narrow.V), narrow.V).view(-1, 64).sum(1)
    assert ((sums / (64 * value[0]) - 1).abs() < 0.125 / 64).all()


@needs_native
def test_the_kernel_writes_the_codes_that_the_formula_gives() -> None:
    grad, seed = values(2, 6) * 1e18, Hyper(0, 0, 0, 0, 0, 5).seed
    random = narrow.random_of_blocks(0, grad.numel(), seed, torch.device("cpu"))
    state = replace(start(StateFormat("adamw", "8bit", 8), torch.ones(grad.numel())), grad=grad)
    update.update_range(state, Hyper(0.0, 0.0, 0.0, 1e-8, 0.0, 5), 1.0, 1)  # no memory: m is g, v its square
    codes, scales = narrow.encode(grad, random.m, narrow.M)
    assert torch.equal(state.m, codes) and torch.equal(state.scales[0::2], scales)
    codes, scales = narrow.encode(grad.square(), random.v, narrow.V)
    assert torch.equal(state.v, codes) and torch.equal(state.scales[1::2], scales)
    state = replace(start(StateFormat("sgd", "8bit", 8), torch.ones(grad.numel())), grad=grad)
    update.update_range(state, Hyper(2.0**-9, 0.0, 0.0, 0.0, 0.0, 5), 1.0, 1)
    master = (1 - grad.double() * 2.0**-9).float()
    weight, low = narrow.round_master_to_24(master, random.master)
    assert torch.equal(state.weight, weight) and torch.equal(state.low, low)
    random = narrow.random_of_elements(0, grad.numel(), seed, torch.device("cpu"))
    state = replace(start(StateFormat("sgd", "bfloat16", 8), torch.ones(grad.numel())), grad=grad)
    update.update_range(state, Hyper(2.0**-9, 0.0, 0.0, 0.0, 0.0, 5), 1.0, 1)
    assert torch.equal(state.m, narrow.round_to_16(grad, random.m))
    weight, low = narrow.round_master_to_24(master, random.master)
    assert torch.equal(state.weight, weight) and torch.equal(state.low, low)


@needs_native
def test_what_the_kernel_decodes_is_what_the_formula_does() -> None:
    """With betas of one half and no gradient the moments are halved, exactly, whatever bits they are rounded by."""
    for rule, seeds in (("adamw", range(5)), ("lion", range(2)), ("sgd", range(2))):
        for seed in seeds:
            state = replace(start(StateFormat(rule, "8bit"), torch.zeros(64 * 64)), grad=torch.zeros(64 * 64))
            parts = {"m": (narrow.M, 0), "v": (narrow.V, 1)} if rule == "adamw" else {"m": (narrow.M, 0)}
            before = {}
            for name, (code, index) in parts.items():
                value = values(seed, 4) if name == "m" else values(seed + 9, 4).square() * 1e20
                bits = torch.randint(0, 1 << 20, (64 * 64,), generator=torch.Generator().manual_seed(seed))
                codes, scales = narrow.encode(value, bits, code)
                getattr(state, name).copy_(codes)
                state.scales[index::2] = scales
                before[name] = scales, narrow.decode(codes, scales, code).view(-1, 64)
            update.update_range(state, Hyper(0.0, 0.5, 0.5, 1e-8, 0.0, 3), 1.0, 2)
            for name, (code, index) in parts.items():
                scales, value = before[name]
                after = narrow.decode(getattr(state, name), state.scales[index::2], code).view(-1, 64)
                # A block whose largest was rounded down may have a smaller scale now, and finer codes.
                same = state.scales[index::2] == scales - 1
                assert same.float().mean() > 0.8 and torch.equal(after[same], value[same] / 2), (rule, name)


_OF_A_KERNEL = """
import hashlib, itertools, sys, torch
from spillway import native
from spillway.optim.update import Hyper, StateRange, split_master, update_range
from spillway.spec.state import MOMENTS, StateFormat
generator = torch.Generator().manual_seed(7)
kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
found = hashlib.sha256()
weights = {torch.float32: torch.float32, torch.bfloat16: torch.int16, torch.float16: torch.float32}
for rule, moments, weight, low_bits in itertools.product(("adamw", "lion", "sgd"), MOMENTS, weights, (16, 8)):
    form, size = StateFormat(rule, moments, low_bits), 64 * 100
    master = torch.randn(size, generator=generator)
    upper, low = split_master(master.clone())
    if weight is not torch.bfloat16:
        upper, low = master.to(weight), None if weight is torch.float32 else master.clone()
    elif low_bits == 8:
        low = ((low.int() >> 8) & 0xFF).to(torch.uint8)
    m, v = torch.zeros(size, dtype=kinds[moments]), torch.zeros(size, dtype=kinds[moments]) if form.has_v else None
    scales = torch.zeros(size // 32, dtype=torch.uint8) if moments == "8bit" else None
    exact = moments == "float32"  # with others gradients have the type of their weights, or float32
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if exact else (weight, torch.float32)
    for step, dtype in enumerate(dtypes, 1):
        grad = (torch.randn(size, generator=generator) * 1e-2).to(dtype)
        state = StateRange(form, 0, upper, low, m, v, scales, grad)
        update_range(state, Hyper(1e-2, 0.9, 0.99, 1e-8, 0.1, step), 0.5, 2)
    for array in state.stored():
        found.update(array.view(torch.uint8).numpy().tobytes())
print(native.kernel_name(), found.hexdigest())
"""


@needs_native
def test_every_instruction_set_gives_the_same_bits() -> None:
    said = {}
    for kernel in ("avx512", "avx2", "portable"):
        environment = {**os.environ, "SPILLWAY_KERNEL": kernel}
        done = subprocess.run(
            [sys.executable, "-c", _OF_A_KERNEL], env=environment, capture_output=True, text=True, check=True
        )
        name, bits = done.stdout.split()
        said[name] = bits
    assert "portable" in said and len(set(said.values())) == 1, said


def test_an_average_that_moves_by_a_thousandth_a_step_still_moves() -> None:
    """Rounded to nearest it would stand still for good."""
    grads = [torch.full((256,), 1e-3)] * 2000
    for moments in ("bfloat16", "8bit"):
        state = start(StateFormat("adamw", moments, 16), torch.zeros(256))
        for step, grad in enumerate(grads, 1):
            update.update_range(replace(state, grad=grad), Hyper(0.0, 0.9, 0.999, 1e-8, 0.0, step), 1.0, 1)
        v = state.v.float() if state.scales is None else narrow.decode(state.v, state.scales[1::2], narrow.V)
        expected = 1e-6 * (1 - 0.999**2000)
        assert float(v.mean()) == pytest.approx(expected, rel=0.05), moments


@pytest.mark.parametrize("bits", (16, 8))
def test_gradients_that_fall_to_zero_beside_a_large_one_leave_no_large_steps(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their m outlives their v by decades: divided by the root of a zero it would move weights by hundreds of lr."""
    generator = torch.Generator().manual_seed(6)
    lr = 1e-3
    for native_part in {native.available(), False}:
        monkeypatch.setattr(native, "available", lambda there=native_part: there)
        state = start(StateFormat("adamw", "8bit", bits), torch.zeros(4096))
        worst = 0.0
        for step in range(1, 81):
            grad = torch.randn(4096, generator=generator) * 1e-5 if step <= 40 else torch.zeros(4096)
            grad[::64] = 1.0
            before = join_master(state.weight, state.low)
            update.update_range(replace(state, grad=grad), Hyper(lr, 0.9, 0.999, 1e-8, 0.0, step), 1.0, 1)
            worst = max(worst, float((join_master(state.weight, state.low) - before).abs().max()))
        assert worst < 2.5 * lr, f"{worst / lr:.1f} lr"
