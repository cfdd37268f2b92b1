"""How much of what is tried at random is tried in every run of the tests; all of it under -m full."""

whole = False  # set when the tests are collected


def examples(count: int) -> int:
    """Of a property."""
    return count if whole else -(-count // 3)
