import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.spec.sizes import align, counted, format_flops, format_seconds, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("500M", 5 * 10**8), ("1.5 tb", 1500 * 10**9), ("7", 7), (9, 9)],
)
def test_sizes_are_read_as_people_write_them(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "-3GB", "3 parsecs", "1e9"])
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 10**15))
def test_a_printed_size_is_within_half_a_percent(num_bytes: int) -> None:
    number, unit = format_size(num_bytes).split()
    assert abs(parse_size(number + unit) - num_bytes) <= 0.005 * num_bytes + 1


@given(st.integers(0, 10**9), st.sampled_from([1, 64, 4096]))
def test_align_goes_up_to_the_next_multiple(num_bytes: int, alignment: int) -> None:
    result = align(num_bytes, alignment)
    assert result % alignment == 0 and num_bytes <= result < num_bytes + alignment


def test_durations_are_for_people() -> None:
    assert [format_seconds(s) for s in (0.25, 12.34, 245, 12000)] == ["250 ms", "12.3 s", "4 min 05 s", "3 h 20 min"]


def test_rates_are_for_people() -> None:
    assert [format_flops(rate) for rate in (149.3e12, 0.31e12, 8.6e9)] == [
        "149.3 TFLOP/s",
        "0.3 TFLOP/s",
        "8.6 GFLOP/s",
    ]


def test_one_of_a_kind_is_no_plural() -> None:
    assert [counted(number, "step") for number in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
