import errno
import os
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spillway import native
from spillway.native import Batch, DiskEngine, Transfer, TransferError, batch_of, transfers_of
from spillway.spec.errors import DiskError
from spillway.spec.sizes import PAGE
from spillway.store import disk as disk_module
from spillway.store.arena import Arena
from spillway.store.disk import STRIPE, Extent, Geometry, StripedDisk
from store.geometries import even_geometry


def engines() -> list[DiskEngine]:
    found = [DiskEngine(), DiskEngine(use_uring=False)]
    plain = DiskEngine()
    plain._library = None
    from concurrent.futures import ThreadPoolExecutor

    plain._threads = ThreadPoolExecutor(4)
    return [*found, plain]


def random_pages(pages: int, seed: int) -> torch.Tensor:
    buffer = Arena(pages * PAGE).buffer
    generator = torch.Generator().manual_seed(seed)
    buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=generator))
    return buffer


@pytest.mark.parametrize("paths", (1, 2, 3))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    extents=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 700)), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_what_is_written_is_read_back_by_every_engine(
    tmp_path: Path, paths: int, extents: list[tuple[int, int]], seed: int
) -> None:
    names = tuple(str(tmp_path / f"{paths}{index}") for index in range(paths))
    disk = StripedDisk(Geometry(names, (3, 1, 2)[:paths]), keep=False)
    disk.reserve(1300 * PAGE)
    writer, *_ = engines()
    for offset, pages in extents:
        content = random_pages(pages, seed)
        disk.write_all(writer, [(Extent(offset * PAGE, pages * PAGE), content)])
        disk.sync()
        for engine in engines():
            back = random_pages(pages, seed + 1)
            disk.read(engine, Extent(offset * PAGE, pages * PAGE), back)
            assert torch.equal(back, content), engine.backend
    disk.close()


@settings(max_examples=40, deadline=None)
@given(
    shares=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    offset=st.integers(0, 40 * 256),
    pages=st.integers(1, 12 * 256),
)
def test_an_extent_is_cut_over_the_paths_in_rows_of_their_shares(shares: list[int], offset: int, pages: int) -> None:
    geometry = Geometry(tuple(map(str, range(len(shares)))), tuple(shares))
    owners = [path for path, share in enumerate(shares) for _ in range(share)]  # of the stripes of a row
    batch = geometry.batch(range(len(shares)), Extent(offset * PAGE, pages * PAGE), 1 << 40)
    address = 1 << 40
    for transfer in transfers_of(batch):
        assert transfer.address == address, "in the order of the address space, without gaps"
        for at in range(0, transfer.num_bytes, PAGE):
            row, stripe = divmod((offset * PAGE + address - (1 << 40)) // STRIPE, len(owners))
            path, inside = owners[stripe], stripe - owners.index(owners[stripe])
            place = (row * shares[path] + inside) * STRIPE + (offset * PAGE + address - (1 << 40)) % STRIPE
            assert (transfer.fd, transfer.offset + at) == (path, place)
            assert geometry.where(offset * PAGE + address - (1 << 40)) == (geometry.files()[path], place)
            address += PAGE
    assert address == (1 << 40) + pages * PAGE


def test_fresh_space_reads_as_zeros_even_where_an_earlier_run_wrote(tmp_path: Path) -> None:
    engine = DiskEngine()
    for _ in range(2):
        disk = StripedDisk(even_geometry((tmp_path,)), keep=False)
        disk.reserve(16 * PAGE)
        back = random_pages(16, 3)
        disk.read(engine, Extent(0, 16 * PAGE), back)
        assert not back.any()
        disk.write_all(engine, [(Extent(0, 16 * PAGE), random_pages(16, 4))])
        disk.close()


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    disk = StripedDisk(even_geometry((tmp_path,)), keep=False)
    with pytest.raises(DiskError, match="in use by another run"):
        StripedDisk(even_geometry((tmp_path,)), keep=False)
    disk.close()
    StripedDisk(even_geometry((tmp_path,)), keep=False).close()


def test_a_store_that_is_too_full_says_how_much_is_needed_and_free(tmp_path: Path) -> None:
    disk = StripedDisk(even_geometry((tmp_path,)), keep=False)
    with pytest.raises(DiskError, match=r"needs .* TB and has .* free"):
        disk.reserve(1 << 50)
    disk.close()


def test_a_file_system_that_reserves_nothing_itself_is_written_to_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(fd: int, offset: int, length: int) -> None:
        for block in range(offset, offset + length, 4096):
            os.pwrite(fd, b"\0", block)

    monkeypatch.setattr(os, "posix_fallocate", written)
    disk = StripedDisk(even_geometry((tmp_path,)), keep=False)
    disk.reserve(1 << 20)
    assert (tmp_path / disk.geometry.file_name).stat().st_size > 0
    disk.close()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written"):
        StripedDisk(even_geometry((tmp_path / "file",)), keep=False)


@pytest.mark.parametrize("number", range(3))
def test_reading_past_the_end_names_the_failing_transfer(tmp_path: Path, number: int) -> None:
    file = tmp_path / "short"
    file.write_bytes(b"x" * (4 * PAGE))
    fd = os.open(file, os.O_RDWR)
    buffer = random_pages(8, 0)
    good = Transfer(fd, buffer.data_ptr(), 0, 4 * PAGE)
    bad = Transfer(fd, buffer.data_ptr() + 4 * PAGE, 8 * PAGE, 4 * PAGE)
    with pytest.raises(TransferError) as caught:
        engines()[number].run(batch_of([good, bad]), is_write=False)
    assert caught.value.index == 1
    os.close(fd)


@pytest.mark.parametrize(("failures", "is_lost"), ((3, False), (4, True)))
@pytest.mark.parametrize("is_write", (False, True))
def test_plain_transfers_are_tried_again_and_short_ones_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, is_lost: bool, is_write: bool
) -> None:
    """As the native part's are: see tests/test_faults.py."""
    content, back, left = random_pages(9, 0), random_pages(9, 1), iter(range(failures))
    (tmp_path / "file").write_bytes(bytes(9 * PAGE) if is_write else content.numpy().tobytes())
    fd, name = os.open(tmp_path / "file", os.O_RDWR), "pwritev" if is_write else "preadv"
    true_move = getattr(os, name)

    def fails(fd: int, views: list[memoryview], offset: int) -> int:
        if next(left, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(true_move(fd, [views[0][: 2 * PAGE]], offset))

    monkeypatch.setattr(os, name, fails)
    plain = engines()[2]
    buffer = content if is_write else back
    transfer = Transfer(fd, buffer.data_ptr(), 0, 9 * PAGE)
    if is_lost:
        with pytest.raises(TransferError, match="Input/output"):
            plain.run(batch_of([transfer]), is_write)
    else:
        plain.run(batch_of([transfer]), is_write)
        assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()
        assert torch.equal(buffer, content)
    os.close(fd)


def test_a_failed_write_names_path_and_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StripedDisk(even_geometry((tmp_path,)), keep=False)
    disk.reserve(8 * PAGE)

    class Broken(DiskEngine):
        def run(self, batch: Batch, is_write: bool) -> None:
            raise TransferError(5, 0)

    with pytest.raises(DiskError, match=rf"cannot write to {tmp_path}/spillway.data at offset 4096 .*Input/output"):
        disk.write_all(Broken(), [(Extent(PAGE, PAGE), random_pages(1, 0))])
    disk.close()


@pytest.mark.skipif(not native.available(), reason=f"no native library: {native.load_problem()}")
def test_the_kernel_interface_or_the_thread_pool_is_in_use() -> None:
    assert DiskEngine().backend in ("io_uring", "threads")
    assert DiskEngine(use_uring=False).backend == "threads"
    assert disk_module.STRIPE % PAGE == 0


def test_registered_files_and_memory_move_the_same_bytes(tmp_path: Path) -> None:
    disk = StripedDisk(even_geometry((tmp_path / "a", tmp_path / "b")), keep=False)
    disk.reserve(8 << 20)
    engine = DiskEngine(depth=4)
    inside, outside = Arena(4 << 20).buffer, Arena(4 << 20).buffer
    engine.register(disk.files, inside.data_ptr(), inside.numel())
    for buffer, offset in ((inside, 0), (outside, 4 << 20)):
        buffer.random_(0, 256)
        wanted = buffer.clone()
        extent = Extent(offset, buffer.numel())
        disk.write_all(engine, [(extent, buffer)])
        buffer.zero_()
        disk.read(engine, extent, buffer)
        assert torch.equal(buffer, wanted)
    engine.register((), 0, 0)
    inside.zero_()
    disk.read(engine, Extent(4 << 20, 4 << 20), inside)
    assert torch.equal(inside, outside)
    engine.close()
    disk.close()


def test_engines_that_are_closed_leave_no_threads_behind(tmp_path: Path) -> None:
    file, content = tmp_path / "file", torch.zeros(8 << 20, dtype=torch.uint8)
    file.write_bytes(bytes(content.numel()))
    fd, counts = os.open(file, os.O_RDWR), []
    for _ in range(4):
        engine = DiskEngine(use_uring=False)
        engine.run(batch_of([Transfer(fd, content.data_ptr(), 0, content.numel())]), is_write=False)
        engine.close()
        counts.append(psutil.Process().num_threads())
    os.close(fd)
    assert counts[-1] == counts[0]


def test_a_fork_holds_neither_files_nor_locks(tmp_path: Path) -> None:
    """As the workers of a DataLoader are: one that outlives a run would keep its store from the next."""
    disk = StripedDisk(even_geometry((tmp_path,)), keep=False)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, str(len(disk.files)).encode())
        os._exit(0)
    assert os.read(told, 9) == b"0"
    os.waitpid(child, 0)
    with pytest.raises(DiskError, match="in use by another run"):
        StripedDisk(even_geometry((tmp_path,)), keep=False)
    disk.close()
    StripedDisk(even_geometry((tmp_path,)), keep=False).close()
    for end in (told, tell):
        os.close(end)


def test_a_directory_with_a_name_like_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "spillway.data.backup").mkdir()
    disk = StripedDisk(even_geometry((tmp_path,)), keep=False)
    disk.drop_others()
    assert (tmp_path / "spillway.data.backup").is_dir()
    disk.close()
