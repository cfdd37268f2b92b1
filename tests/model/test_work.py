"""What calls take while they compute, told by calls that were measured."""

from hypothesis import given
from hypothesis import strategies as st

from spillway.model.work import MeasuredWorks, Work

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=30)


def peaks(asked: list[int], slack: float) -> tuple[list[int], list[int]]:
    """What is told of rows of these lengths, each of which takes its square; and which were measured."""
    works, measured = MeasuredWorks(), []

    def measure(length: int) -> Work:
        measured.append(length)
        return Work(length**2)

    shapes = [((2, length), (length,)) for length in asked]
    found = [works.of("block", sizes, slack, lambda length=sizes[0][1]: measure(length)) for sizes in shapes]
    return [work.peak for work in found], measured


@given(lengths)
def test_never_less_is_told_than_a_call_takes_nor_much_more(asked: list[int]) -> None:
    found, _ = peaks(asked, 1.25)
    assert all(length**2 <= peak <= (1.25 * length) ** 2 for length, peak in zip(asked, found, strict=True))


@given(lengths)
def test_without_slack_each_size_is_measured(asked: list[int]) -> None:
    found, measured = peaks(asked, 1.0)
    assert found == [length**2 for length in asked] and measured == list(dict.fromkeys(asked))


def test_of_many_lengths_few_are_measured() -> None:
    assert len(peaks(list(range(2048, 0, -1)), 1.25)[1]) < 40


def test_what_is_larger_in_one_dimension_and_smaller_in_another_stands_for_nothing() -> None:
    works = MeasuredWorks()
    works.of("block", ((4, 8), (4,)), 4.0, lambda: Work(32))
    assert works.of("block", ((2, 16), (4,)), 4.0, lambda: Work(16)) == Work(16)
    assert works.of("other", ((4, 8), (4,)), 4.0, lambda: Work(1)) == Work(1)
