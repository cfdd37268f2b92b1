"""What Python calls options and the command line flags."""

import pytest

from spillway.spec.words import as_flags


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("raise host_memory", "raise --host-memory"),
        ("weights='disk' needs a store", "--weights disk needs a store"),
        ("choose device='cpu', or", "choose --device cpu, or"),
        ("allow them with allow_pickle=True", "allow them with --allow-pickle"),
        ("not streams=2", "not --streams 2"),
        ("written every save_steps, a crash", "written every --save-steps, a crash"),
        ("host_memory is 3 GB and 2 GB are free", "--host-memory is 3 GB and 2 GB are free"),
        ("optim='adamv' is not one of adamw, sgd", "--optim adamv is not one of adamw, sgd"),
    ],
)
def test_keyword_arguments_become_flags(message: str, expected: str) -> None:
    assert as_flags(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        "the weights rest on disk, and the store is a device",
        "/runs/host_memory/store cannot be opened",
        "runs/save_steps=3/x is no run",
        "--host-memory 3GB is more than there is",
        "'host_memory' is no model",
        "my_host_memory and host_memory_2",
        "update=(1, 2)",
    ],
)
def test_words_and_paths_stay(message: str) -> None:
    assert as_flags(message) == message
