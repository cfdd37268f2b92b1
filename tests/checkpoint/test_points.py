"""Going on from saved points: damage, other placements, other drives, frozen parameters."""

import contextlib
import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import models
import spillway
from spillway.api import read_parameters
from spillway.assembly import prepared
from spillway.checkpoint import generators
from spillway.checkpoint import points as points_module
from spillway.spec.errors import DamageError, DiskError, SpillwayError, StoreMoves, UsageError
from spillway.spec.plan import IN_PLACE, KeepPoints
from spillway.store import move as move_module
from spillway.store.disk import StripedDisk
from spillway.store.manifest import Manifest, load_manifest, load_manifests, manifest_files, save_manifest
from store.geometries import even_geometry

TWO = KeepPoints(2, True)


class Run:
    """A model under training, one deterministic batch per step."""

    def __init__(
        self,
        store: Path | Sequence[Path],
        resume: bool | Path = False,
        freeze: str = "",
        settings: Any = None,
        **options: Any,
    ) -> None:
        model = models.two_lists().to(torch.bfloat16)
        for name, param in model.named_parameters():
            if freeze and freeze in name:
                param.requires_grad_(False)
        where = {"device": "cpu", "states": "disk", "weights": "disk", "keep": TWO, **options}
        settings = settings or spillway.AdamW(lr=1e-2, max_grad_norm=None)
        self.model: nn.Module
        self.model, self.optimizer = spillway.prepare(model, settings, store=store, resume=resume, **where)
        try:
            prepared(self.model).session.open((), self.batch(0))
        except SpillwayError:
            spillway.close(self.model)
            raise

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        found = models.batch("two_lists", step)
        return {key: x.bfloat16() if x.is_floating_point() else x for key, x in found.items()}

    @property
    def points(self) -> Any:
        return prepared(self.model).points

    def train(self, until: int) -> "Run":
        while self.optimizer.num_steps < until:
            models.loss_of(self.model(**self.batch(self.optimizer.num_steps))).backward()
            self.optimizer.step()
        return self

    def save(self, background: bool = False) -> None:
        parts = prepared(self.model)
        parts.session.come_to_rest()
        save = parts.points.save_behind if background else parts.points.save
        save(parts.session.store, self.optimizer.num_steps)

    def end(self) -> dict[str, torch.Tensor]:
        self.save()
        found = read_parameters(self.model)
        spillway.close(self.model)
        return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return Run(tmp_path_factory.mktemp("whole") / "store").train(6).end()


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def flip_bit(store: Path, unit: int, component_offset: int = 0) -> str:
    """One bit of the newest saved point; the file and offset it lies at."""
    manifest = load_manifest(store)
    assert manifest is not None
    offset = manifest.units[unit].offset + component_offset
    file = store / manifest.geometry.file_name
    with open(file, "r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)[0]
        handle.seek(offset)
        handle.write(bytes([byte ^ 4]))
    return str(file)


def test_as_many_saved_points_stay_as_asked_for(tmp_path: Path) -> None:
    Run(tmp_path).train(5).end()
    assert [step for step, _ in manifest_files(tmp_path)] == [5, 4]


def test_room_for_activations_on_the_drives_is_reserved_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, wanted = StripedDisk.reserve, list[int]()

    def noting(disk: StripedDisk, num_bytes: int) -> None:
        wanted.append(num_bytes)
        reserve(disk, num_bytes)

    monkeypatch.setattr(StripedDisk, "reserve", noting)
    run = Run(tmp_path, activations="disk")
    states, before = wanted[0], max(wanted)
    assert before > states, "no activations are on the drive: this test tests nothing"
    run.train(2)
    assert max(wanted) == before
    spillway.close(run.model)


@pytest.mark.parametrize("states", ["disk", "host"])
def test_how_far_a_saved_point_has_come_is_told(tmp_path: Path, states: str) -> None:
    run = Run(tmp_path, states=states, weights=states).train(2)
    parts = prepared(run.model)
    parts.session.come_to_rest()
    store, told = parts.session.store, list[int]()
    expected = run.points.num_unwritten_bytes(store, 2)
    run.points.save(store, 2, told.append)
    resting = sum(home.layout.grad_bytes + home.layout.state_bytes for home in store.homes.units)
    assert sum(told) == expected == (0 if states == "disk" else resting)
    assert run.points.num_unwritten_bytes(store, 2) == 0
    run.end()


def test_a_flipped_bit_falls_back_to_the_saved_point_before(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    Run(tmp_path).train(4).end()
    file = flip_bit(tmp_path, 1, 4096)
    run = Run(tmp_path, resume=True)
    assert run.optimizer.num_steps == 3
    (warning,) = run.points.warnings
    assert "step 4 is not used" in warning and file in warning and "damaged at offset" in warning
    assert same(run.train(6).end(), expected)
    assert [step for step, _ in manifest_files(tmp_path)] == [6, 5]


def test_a_flipped_bit_in_the_only_saved_point_names_file_and_offset(tmp_path: Path) -> None:
    Run(tmp_path, keep=KeepPoints(1, True)).train(2).end()
    file = flip_bit(tmp_path, 0)
    with pytest.raises(DiskError, match=rf"{file} is damaged at offset \d+"):
        Run(tmp_path, resume=True, keep=KeepPoints(1, True))


def test_damage_outside_the_saved_point_does_not_matter(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    Run(tmp_path, keep=KeepPoints(1, True)).train(3).end()
    manifest = load_manifest(tmp_path)
    assert manifest is not None
    file = tmp_path / manifest.geometry.file_name
    used = {range(unit.offset, unit.offset + unit.num_bytes) for unit in manifest.units}
    with open(file, "r+b") as handle:
        for page in range(0, file.stat().st_size, 4096):
            if not any(page in part for part in used):
                handle.seek(page)
                handle.write(b"\xff" * 4096)
    assert same(Run(tmp_path, resume=True, keep=KeepPoints(1, True)).train(6).end(), expected)


def test_a_truncated_file_and_a_missing_stripe_are_named(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    Run(paths).train(2).end()
    data = paths[0] / "spillway.data"
    whole = data.read_bytes()
    data.write_bytes(whole[:4096])
    with pytest.raises(DamageError, match=rf"{data} ends at byte 4096 and the saved run needs \d+"):
        Run(paths, resume=True)
    data.write_bytes(whole)
    data = paths[1] / "spillway.data"
    data.unlink()
    with pytest.raises(DiskError, match=f"{data}, a part of the saved run, is missing"):
        Run(paths, resume=True)


def test_a_file_that_ends_before_the_newest_saved_point_leaves_the_one_before_it(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    def end(manifest: Manifest) -> int:
        return max(unit.offset + unit.num_bytes for unit in manifest.units)

    Run(tmp_path).train(2).end()
    newest, older = load_manifests(tmp_path)[0]
    while end(newest) < end(older):  # which of the two lies behind the other is a matter of the number of steps
        Run(tmp_path, resume=True).train(newest.step + 1).end()
        newest, older = load_manifests(tmp_path)[0]
    with open(tmp_path / newest.geometry.file_name, "r+b") as handle:
        handle.truncate(end(older))
    run = Run(tmp_path, resume=True)
    assert run.optimizer.num_steps == older.step and "it was cut short" in run.points.warnings[0]
    assert same(run.train(6).end(), expected)


def test_a_read_that_fails_for_now_costs_no_saved_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(tmp_path).train(3).end()

    def fail(*_: object) -> None:
        raise DiskError("cannot read: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(StripedDisk, "read", fail)
        with pytest.raises(DiskError, match="Input/output error"):
            Run(tmp_path, resume=True)
    run = Run(tmp_path, resume=True)
    assert run.optimizer.num_steps == 3 and not run.points.warnings
    run.end()


def test_saved_points_are_not_given_up_for_none(tmp_path: Path) -> None:
    Run(tmp_path).train(3).end()
    with pytest.raises(UsageError, match="holds step 3, and a run that keeps no saved points"):
        Run(tmp_path, resume=True, keep=IN_PLACE)
    assert [step for step, _ in manifest_files(tmp_path)] == [3, 2]


@pytest.mark.parametrize("before", ("disk", "host"))
@pytest.mark.parametrize("after", ("disk", "host"))
def test_a_run_made_in_place_goes_on_from_where_it_was_stopped(
    tmp_path: Path, before: str, after: str, expected: dict[str, torch.Tensor]
) -> None:
    Run(tmp_path, states=before, weights="disk", keep=IN_PLACE).train(2).end()
    size = (tmp_path / "spillway.data").stat().st_size
    run = Run(tmp_path, states=after, weights="disk", keep=IN_PLACE, resume=True)
    assert run.optimizer.num_steps == 2 and [step for step, _ in manifest_files(tmp_path)] == [2]
    run.train(4)
    prepared(run.model).session.come_to_rest()
    assert not manifest_files(tmp_path), "what it names was overwritten"
    run.end()
    assert [step for step, _ in manifest_files(tmp_path)] == [4]
    run = Run(tmp_path, states=before, weights="disk", keep=IN_PLACE, resume=True)
    assert same(run.train(6).end(), expected)
    assert (tmp_path / "spillway.data").stat().st_size == size


def test_a_run_made_in_place_that_finds_room_keeps_points_from_then_on(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    Run(tmp_path, keep=IN_PLACE).train(2).end()
    run = Run(tmp_path, resume=True).train(4)
    prepared(run.model).session.come_to_rest()
    assert [step for step, _ in manifest_files(tmp_path)] == [4, 3]
    assert same(run.train(6).end(), expected)


def test_a_run_made_in_place_that_fails_before_it_overwrites_anything_loses_nothing(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    Run(tmp_path, keep=IN_PLACE).train(2).end()
    run = Run(tmp_path, keep=IN_PLACE, resume=True)
    with pytest.raises(ZeroDivisionError):
        raise_in_forward(run)
    spillway.close(run.model)
    assert [step for step, _ in manifest_files(tmp_path)] == [2]
    assert same(Run(tmp_path, keep=IN_PLACE, resume=True).train(6).end(), expected)


def raise_in_forward(run: Run) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with list(run.model.children())[-1].register_forward_pre_hook(fail):
        models.loss_of(run.model(**run.batch(run.optimizer.num_steps)))


def test_a_saved_point_of_another_model_is_passed_over(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    Run(tmp_path / "own").train(3).end()
    Run(tmp_path / "other", freeze="first").train(4).end()
    ((_, foreign), *_) = manifest_files(tmp_path / "other")
    shutil.copy(foreign, tmp_path / "own")
    run = Run(tmp_path / "own", resume=True)
    assert run.optimizer.num_steps == 3 and "is of another model and is not used" in run.points.warnings[0]
    assert same(run.train(6).end(), expected)


@pytest.mark.parametrize("how", ("removed", "replaced"))
def test_a_store_that_is_taken_away_while_it_is_used_stops_the_run(tmp_path: Path, how: str) -> None:
    run = Run(tmp_path).train(2)
    data = tmp_path / "spillway.data"
    data.unlink()
    if how == "replaced":
        data.write_bytes(b"")
    with pytest.raises(DiskError, match=f"{data} was {how}"):
        run.train(5)
    with contextlib.suppress(DiskError):
        spillway.close(run.model)


def test_a_damaged_manifest_falls_back_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).train(3).end()
    (_, newest), _ = manifest_files(tmp_path)
    newest.write_text(newest.read_text().replace('"step": 3', '"step": 9'))
    run = Run(tmp_path, resume=True)
    assert run.optimizer.num_steps == 2 and "checksum does not match" in run.points.warnings[0]
    run.end()
    with pytest.raises(DiskError, match="a run of another model"):
        Run(tmp_path, resume=True, freeze="first")
    with pytest.raises(UsageError, match="holds step 2 of an earlier run"):
        Run(tmp_path)


@pytest.mark.parametrize("before", ("disk", "host"))
@pytest.mark.parametrize("after", ("disk", "host"))
def test_a_run_goes_on_bit_for_bit_wherever_its_states_rest_now(
    tmp_path: Path, before: str, after: str, expected: dict[str, torch.Tensor]
) -> None:
    Run(tmp_path, states=before, weights=before).train(3).end()
    run = Run(tmp_path, resume=True, states=after, weights=after)
    assert run.optimizer.num_steps == 3
    assert same(run.train(6).end(), expected)


def test_a_run_moves_to_other_drives(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    one, more = tmp_path / "one", [tmp_path / "x", tmp_path / "y", tmp_path / "z"]
    Run(one).train(2).end()
    with pytest.warns(StoreMoves, match=r"step 2 \(.*\) is checked and moved from .*/one to .*/x, "):
        run = Run(more, resume=one).train(4)
    assert sorted(file.name for file in one.iterdir()) == ["spillway.lock", "spillway.owner"]
    run.end()
    assert same(Run([one], resume=more[0]).train(6).end(), expected)
    assert not any(list(path.glob("spillway.data*")) for path in more)


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), random.gauss(), float(np.random.rand()), float(np.random.randn())]


def test_random_numbers_go_on_from_the_saved_point(tmp_path: Path) -> None:
    run = Run(tmp_path).train(3)
    random.gauss(), np.random.randn()  # each leaves a second one for later
    run.train(4).save()
    expected = drawn()
    spillway.close(run.model)
    drawn()
    spillway.close(Run(tmp_path, resume=True).model)
    assert drawn() == expected


def test_a_run_that_goes_on_without_its_gpu_does_not_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    saved = {**generators.states(here), "cuda": "00" * 16}
    expected = drawn()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("a GPU was opened"))
    generators.go_on_from(saved, here)
    assert drawn() == expected


class Drawing(nn.Module):
    """What it gives depends on random numbers and on a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("states", ("host", "disk"))
def test_a_point_that_is_saved_between_the_backwards_of_a_step_is_of_the_step_before(
    states: str, tmp_path: Path
) -> None:
    def run(store: Path, backwards: range, save_at: int = -1, resume: bool = False) -> dict[str, torch.Tensor]:
        model, optimizer = spillway.prepare(
            Drawing(),
            spillway.AdamW(lr=1e-2),
            store=store,
            states=states,
            device="cpu",
            gradient_accumulation_steps=3,
            resume=resume,
        )
        for number in backwards:
            if number == save_at:
                spillway.save_point(model)
                break
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).backward()
            if number % 3 == 2:
                optimizer.step()
        found = {name: tensor.clone() for name, tensor in (*read_parameters(model).items(), *model.named_buffers())}
        spillway.close(model)
        return found

    torch.manual_seed(1)
    whole = run(tmp_path / "whole", range(9))
    torch.manual_seed(1)
    run(tmp_path / "cut", range(9), save_at=5)
    assert same(run(tmp_path / "cut", range(3, 9), resume=True), whole)


class Killed(BaseException):
    """Nothing that is running looks after this."""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_kill_between_the_commit_of_a_move_and_its_end_loses_nothing(
    tmp_path: Path, elsewhere: bool, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    Run(one).train(3).end()
    paths = [two] if elsewhere else [one, two]

    def killed(directory: Path, manifest: Manifest) -> None:
        save_manifest(directory, manifest, keep_last=9)
        raise Killed

    with monkeypatch.context() as patched, pytest.warns(StoreMoves, match="the 1 saved before it"):
        patched.setattr(move_module, "save_manifest", killed)
        with pytest.raises(Killed):
            Run(paths, resume=one)
    assert [step for step, _ in manifest_files(one)] == [3, 2]
    run = Run(paths, resume=one)
    assert run.optimizer.num_steps == 3 and run.points.directory == paths[0]
    assert same(run.train(6).end(), expected)
    assert not (one / "spillway.data").exists() or elsewhere


def test_the_same_call_goes_on_where_the_run_was_moved_to(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    Run(tmp_path / "one").train(2).end()
    with pytest.warns(StoreMoves):
        Run(tmp_path / "two", resume=tmp_path / "one").train(3).end()
    assert same(Run(tmp_path / "two", resume=tmp_path / "one").train(6).end(), expected)
    Run(tmp_path / "another").train(1).end()
    with pytest.raises(UsageError, match="holds another run than"):
        Run(tmp_path / "another", resume=tmp_path / "two")


def test_a_move_whose_copy_is_not_whole_leaves_the_run_where_it_was(
    tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    Run(one).train(3).end()
    write_all = StripedDisk.write_all

    def flips(disk: StripedDisk, engine: Any, moves: list[Any]) -> None:
        for _, buffer in moves:
            buffer[5] ^= 1
        write_all(disk, engine, moves)

    with monkeypatch.context() as patched, pytest.warns(StoreMoves):
        patched.setattr(StripedDisk, "write_all", flips)
        with pytest.raises(DamageError, match=r"two/spillway\.data\.1 is damaged at offset"):
            Run(two, resume=one)
    assert not list(two.glob("spillway.data*")) and not manifest_files(two)
    assert same(Run(one, resume=True).train(6).end(), expected)


def test_points_of_another_run_that_lie_where_others_do_are_not_used(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    Run(tmp_path / "one").train(3).end()
    Run(tmp_path / "two", keep=KeepPoints(1)).train(1).end()
    shutil.copy(tmp_path / "two" / "step-00000001.json", tmp_path / "one")
    run = Run(tmp_path / "one", resume=True)
    assert ["is of another run" in warning for warning in run.points.warnings] == [True]
    assert run.optimizer.num_steps == 3
    assert same(run.train(6).end(), expected)


def test_a_manifest_that_cannot_be_read_for_now_is_not_taken_for_damaged(
    tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path).train(3).end()

    def fails(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched, pytest.raises(DiskError, match="cannot be read"):
        patched.setattr(Path, "read_bytes", fails)
        Run(tmp_path, resume=True)
    assert [step for step, _ in manifest_files(tmp_path)] == [3, 2]
    assert same(Run(tmp_path, resume=True).train(6).end(), expected)


def test_a_move_that_finds_no_room_leaves_nothing_behind(
    tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, full = tmp_path / "one", tmp_path / "full"
    Run(one).train(2).end()
    true_fallocate = os.posix_fallocate

    def no_room(fd: int, offset: int, num_bytes: int) -> None:
        true_fallocate(fd, offset, num_bytes // 2)  # as file systems do that take what there is
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.warns(StoreMoves), pytest.raises(DiskError):
        patched.setattr(os, "posix_fallocate", no_room)
        Run([full], resume=one)
    assert not list(full.glob("spillway.data*"))
    assert same(Run([one], resume=True).train(6).end(), expected)


def test_what_a_move_that_was_killed_has_left_is_removed(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    Run(tmp_path).train(4).end()
    (tmp_path / "spillway.data.1").write_bytes(bytes(1 << 20))
    assert same(Run(tmp_path, resume=True).train(6).end(), expected)
    assert [file.name for file in tmp_path.glob("spillway.data*")] == ["spillway.data"]


def test_a_run_whose_drives_are_mounted_elsewhere_goes_on(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    Run([tmp_path / "a", tmp_path / "b"]).train(3).end()
    shutil.move(tmp_path / "a", tmp_path / "mounted-a")
    shutil.move(tmp_path / "b", tmp_path / "mounted-b")
    run = Run([tmp_path / "mounted-a", tmp_path / "mounted-b"], resume=True)
    assert same(run.train(6).end(), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "settings",
    (
        spillway.AdamW(lr=1e-2, max_grad_norm=None, moments="8bit", master_bits=24),
        spillway.AdamW(lr=1e-2, max_grad_norm=None, moments="bfloat16"),
        spillway.Lion(lr=1e-3, max_grad_norm=None, moments="8bit"),
        spillway.SGD(lr=1e-1, max_grad_norm=1.0),
    ),
    ids=str,
)
def test_narrow_states_give_the_same_bits_wherever_they_rest_and_after_a_resume(
    tmp_path: Path, settings: spillway.AdamW
) -> None:
    on_disk = Run(tmp_path / "disk", settings=settings).train(4).end()
    in_memory = Run(tmp_path / "host", settings=settings, states="host", weights="host").train(4).end()
    assert same(on_disk, in_memory)
    Run(tmp_path / "cut", settings=settings).train(2).end()
    assert same(Run(tmp_path / "cut", settings=settings, resume=True).train(4).end(), on_disk)
    with pytest.raises(DiskError, match="another model"):
        Run(tmp_path / "cut", resume=True)


@pytest.mark.parametrize("freeze", ("first", "bias"))
def test_frozen_parameters_are_whole_in_every_saved_point(tmp_path: Path, freeze: str) -> None:
    whole = Run(tmp_path / "whole", freeze=freeze).train(6).end()
    store = tmp_path / "store"
    Run(store, freeze=freeze, keep=KeepPoints(1, True)).train(2).end()
    run = Run(store, resume=True, freeze=freeze, keep=KeepPoints(3, True)).train(4)
    run.end()
    assert same(Run(store, resume=True, freeze=freeze, keep=TWO).train(6).end(), whole)


@pytest.mark.parametrize("where", ({"states": "host", "weights": "host"}, {"states": "host", "weights": "disk"}))
def test_a_point_saved_in_the_background_is_the_state_of_its_step(
    tmp_path: Path, where: dict[str, str], monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    write_all = StripedDisk.write_all

    def slowly(self: StripedDisk, *args: Any) -> None:
        if threading.current_thread().name == "spillway-snapshot":
            time.sleep(0.02)
        write_all(self, *args)

    monkeypatch.setattr(StripedDisk, "write_all", slowly)
    run = Run(tmp_path, **where)
    for step in range(1, 6):
        run.train(step)
        parts = prepared(run.model)
        run.save(background=True)
        assert parts.points.pending is not None, "it was not written in the background"
        assert parts.points.saved_step == step - 1
    spillway.close(run.model)
    assert [step for step, _ in manifest_files(tmp_path)] == [5, 4]
    flip_bit(tmp_path, 1, 4096)
    run = Run(tmp_path, resume=True)
    assert run.optimizer.num_steps == 4  # both points are whole: the older one was not touched since
    assert same(run.train(6).end(), expected)


def test_a_point_that_could_not_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    run = Run(tmp_path, states="host", weights="host").train(2)
    spillway.save_point(run.model)
    write_all = StripedDisk.write_all

    def broken(self: StripedDisk, *args: Any) -> None:
        raise DiskError("the drive is gone")

    run.train(3)
    monkeypatch.setattr(StripedDisk, "write_all", broken)
    with pytest.raises(DiskError, match="the drive is gone"):
        spillway.save_point(run.model)
    monkeypatch.setattr(StripedDisk, "write_all", write_all)
    run.train(4)
    assert spillway.save_point(run.model) == 4
    run.train(5)
    spillway.close(run.model)
    run = Run(tmp_path, resume=True)
    assert run.optimizer.num_steps == 4
    assert same(run.train(6).end(), expected)


def test_a_drive_that_holds_a_part_of_another_run_is_never_emptied(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    Run([a, b]).train(3).end()
    with pytest.raises(UsageError, match="part of the run that is saved in"):
        Run(b)
    with pytest.raises(UsageError, match="holds step 3 of another run"):
        Run([c, a])
    Run(c).train(1).end()
    with pytest.raises(UsageError, match="part of the run that is saved in"):
        Run([c, b], resume=True)
    run = Run([b, a], resume=True)  # the same drives in another order
    assert run.optimizer.num_steps == 3 and same(run.train(6).end(), expected)


def test_a_point_is_not_saved_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, states="host", weights="disk").train(2)
    run.save(background=True)
    run.save()
    assert [point.step for point in run.points.found] == [2]
    run.train(5).save()
    run.train(8).end()
    assert [step for step, _ in manifest_files(tmp_path)] == [8, 5]
    flip_bit(tmp_path, 1, 4096)
    run = Run(tmp_path, resume=True)
    assert run.optimizer.num_steps == 5
    spillway.close(run.model)


def test_an_unfinished_step_cannot_be_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, states="host", weights="host").train(1)
    models.loss_of(run.model(**run.batch(1))).backward()
    for save in (lambda: spillway.save_point(run.model), lambda: spillway.save_pretrained(run.model, tmp_path / "out")):
        with pytest.raises(UsageError, match="call optimizer.step"):
            save()
    run.optimizer.step()
    assert spillway.save_point(run.model) == 2
    spillway.close(run.model)


def test_saving_goes_on_after_it_failed_before_anything_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    run = Run(tmp_path, states="host", weights="host").train(2)
    spillway.save_point(run.model)
    run.train(3)
    store = prepared(run.model).session.store

    def broken(*_: object) -> torch.Tensor:
        raise DiskError("no staging")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(store, "staging", broken)
            with pytest.raises(DiskError, match="no staging"):
                spillway.save_point(run.model)
    assert spillway.save_point(run.model) == 3
    spillway.close(run.model)
    assert same(Run(tmp_path, resume=True).train(6).end(), expected)


def test_an_older_point_is_taken_even_where_fewer_are_kept_from_now_on(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    Run(tmp_path, keep=KeepPoints(3, True)).train(4).end()
    flip_bit(tmp_path, 1, 4096)
    run = Run(tmp_path, resume=True, keep=KeepPoints(1, True))
    assert run.optimizer.num_steps == 3
    assert [step for step, _ in manifest_files(tmp_path)] == [3]
    assert same(run.train(6).end(), expected)


def test_a_store_may_be_named_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    monkeypatch.chdir(tmp_path)
    Run(Path("a")).train(3).end()
    monkeypatch.chdir("/")
    run = Run([tmp_path / "a", tmp_path / "b"], resume=tmp_path / "x" / ".." / "a")
    assert same(run.train(6).end(), expected)


def test_a_store_that_another_run_has_saved_to_meanwhile_is_not_emptied(tmp_path: Path) -> None:
    def prepare(resume: bool = False) -> tuple[nn.Module, spillway.optim.optimizer.StreamingOptimizer]:
        return spillway.prepare(
            models.two_lists().bfloat16(), spillway.AdamW(), store=tmp_path, device="cpu", states="disk", resume=resume
        )

    early, _ = prepare()
    first = Run(tmp_path, keep=KeepPoints(1, True))
    first.train(3).end()
    with pytest.raises(UsageError, match="another run has saved"):
        early(**first.batch(0))
    late, _ = prepare(resume=True)
    Run(tmp_path, resume=True, settings=spillway.AdamW(), keep=KeepPoints(1, True)).train(5).end()
    with pytest.raises(UsageError, match="another run has saved"):
        late(**first.batch(0))
    assert [step for step, _ in manifest_files(tmp_path)] == [5]
    spillway.close(early)
    spillway.close(late)


def test_a_first_drive_that_is_not_mounted_costs_the_others_nothing(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    Run((first, second)).train(4).end()
    first.rename(tmp_path / "away")
    for resume in (True, False):
        with pytest.raises(UsageError, match="begins in .*first, where there is nothing"):
            Run((first, second), resume=resume)
    shutil.rmtree(first, ignore_errors=True)
    (tmp_path / "away").rename(first)
    assert same(Run((first, second), resume=True).train(6).end(), expected)


def test_saving_goes_on_after_a_manifest_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, weights="host", states="host", keep=KeepPoints(1, True)).train(2)
    run.save()
    monkeypatch.setattr(points_module, "save_manifest", fails)
    for _ in range(2):
        run.train(run.optimizer.num_steps + 1)
        with pytest.raises(DiskError, match="no room"):
            run.save()
    monkeypatch.undo()
    weights = run.train(5).end()
    assert same(Run(tmp_path, resume=True, keep=KeepPoints(1, True)).end(), weights)


def fails(*_: Any) -> None:
    raise DiskError("no room")


def test_a_sync_that_failed_once_never_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StripedDisk(even_geometry((tmp_path,)), keep=False)

    def lost(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", lost)
    with pytest.raises(DiskError, match="could not be made durable"):
        disk.sync()
    monkeypatch.undo()
    with pytest.raises(DiskError, match="could not be made durable"):
        disk.sync()
    disk.close()
