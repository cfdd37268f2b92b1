import os
import signal
from collections.abc import Iterator

import pytest
import torch

import emulated_gpu
import sampling
from spillway.hardware import timing

# What takes longest begins first, so that nobody waits for it at the end.
_LONG = ("test_crash.py", "test_train.py", "test_answer.py", "test_power_loss.py", "test_stress.py", "test_executor.py")
NOT_BUILT = pytest.StashKey[str]()  # why there is no emulated device


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job: children would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("SPILLWAY_EMULATED_GPU") and not torch.backends.cuda.is_built():
        try:
            emulated_gpu.install()
        except (RuntimeError, OSError, ImportError) as error:  # no compiler, or no headers of Python
            config.stash[NOT_BUILT] = f", and none could be emulated: {str(error).strip().splitlines()[0]}"
    sampling.whole = "not full" not in config.option.markexpr


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The same arithmetic on every machine and in every test. Tests run beside each other: with more threads each small
    operator would wait for cores that another test has."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure is not kept for anybody's runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def brief_measurements() -> Iterator[None]:
    """Plans of tests need no exact rates, and every size of model measures anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ALONE_SECONDS", 0.02)
        patch.setattr(timing, "TOGETHER_SECONDS", 0.02)
        yield


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that are not for a GPU do the same where there is one: "auto" is the CPU, also in their children."""
    with pytest.MonkeyPatch.context() as patch:
        if "gpu" not in request.keywords:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sampling.mark_the_rest(items)
    items.sort(key=lambda item: item.path.name not in _LONG)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="there is no CUDA device here" + config.stash.get(NOT_BUILT, ""))
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
