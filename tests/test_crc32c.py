"""The checksums of the plain path are those of the native library, however they are cut."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway import native
from spillway.crc32c import crc32c


def test_the_check_value_of_the_standard() -> None:
    assert crc32c(np.frombuffer(b"123456789", dtype=np.uint8)) == 0xE3069283


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 700_000), st.integers(0, 700_000), st.integers(0, 2**32 - 1))
def test_content_in_two_parts_has_the_checksum_of_the_whole(first: int, second: int, seed: int) -> None:
    content = np.random.default_rng(seed).integers(0, 256, first + second, dtype=np.uint8)
    assert crc32c(content[first:], crc32c(content[:first])) == crc32c(content)


@pytest.mark.skipif(not native.available(), reason="the native library is not built here")
@pytest.mark.parametrize("size", (0, 1, 4095, 262_143, 262_144, 1_048_576, 1_500_001))
def test_it_is_that_of_the_native_library(size: int) -> None:
    content = torch.randint(0, 256, (size,), dtype=torch.uint8)
    values = array("I", [0])
    native.checksum(content.data_ptr(), size, size, max(size, 1), values, 0, 1)
    assert crc32c(content.numpy()) == values[0]
