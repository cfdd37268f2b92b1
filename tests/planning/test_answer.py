"""`spillway plan`, `probe` and `doctor`."""

import dataclasses
import itertools
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

import directories
import models
import spillway
from spillway.cli.main import run
from spillway.hardware.catalogue import find_machine
from spillway.hardware.limits import process_bytes
from spillway.planning import answer
from spillway.planning.profiler import ModelProfiler
from spillway.planning.question import Question, asked, with_drives
from spillway.planning.question import ask as ask_machine
from spillway.report.progress import Reporter
from spillway.spec.jsonable import to_json
from spillway.spec.options import TrainOptions
from spillway.spec.plan import IN_PLACE


@pytest.fixture
def what_helps() -> None:
    """What would help is looked for in this test: five more plans."""


@pytest.fixture(autouse=True)
def otherwise_nothing_helps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "what_helps" not in request.fixturenames:
        monkeypatch.setattr(answer, "_what_would_help", lambda *_: ())


@pytest.fixture(scope="module")
def profilers() -> dict[Hashable, ModelProfiler]:
    """Of the papers' shapes, which have the same forwards in every test."""
    return {}


@pytest.fixture(autouse=True)
def shapes_are_built_once(profilers: dict[Hashable, ModelProfiler], monkeypatch: pytest.MonkeyPatch) -> None:
    build = Question._profiler

    def profiler(self: Question, layers: int | None, length: int) -> ModelProfiler:
        if not self.options.model.startswith("gpt-"):
            return build(self, layers, length)
        key = (self.options.model, self.options.dtype, layers, length, self.machine.hardware.device)
        if key not in profilers:
            profilers[key] = build(self, layers, length)
        return profilers[key]

    monkeypatch.setattr(Question, "_profiler", profiler)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only a config, as one has before downloading the weights."""
    directory = directories.make_model(tmp_path_factory.mktemp("model") / "llama", hidden_size=128)
    (directory / "model.safetensors").unlink()
    return directory


def ask(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert run(["plan", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_rows_longer_than_the_model_has_positions_are_said_to_be_cut(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for length in ("256", "1024"):
        asked = ("--hardware", "rtx4090+990pro+64GB", "--max-steps", "1", "--max-length", length)
        assert run(["plan", str(model), *asked, "--json"]) == 0
        told.append(capsys.readouterr())
    assert "no more positions" not in told[0].err and "rows are 256 tokens long" in told[1].err
    assert json.loads(told[0].out)["tokens"] == json.loads(told[1].out)["tokens"]


def test_a_plan_needs_only_the_config(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, model, "--hardware", "rtx4090+990pro+64GB", "--max-length", "128", "--max-steps", "100")
    assert found["fits"] and found["tokens"] == 4 * 128
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step_seconds"])
    low, high = found["run_seconds"]
    assert low < 100 * found["step_seconds"] < high
    for tier in ("device", "host", "disk"):
        assert 0 < found["peaks"][tier] <= found["budget"][f"{tier}_bytes"]


@pytest.mark.usefixtures("what_helps")
def test_the_papers_model_on_the_papers_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = ("--per-device-train-batch-size", "4", "--gradient-accumulation-steps", "8", "--max-length", "1024")
    chart = tmp_path / "step.json"
    found = ask(capsys, "gpt-13b", "--hardware", "lohan-4090", *shape, "--chart", chart)
    assert 12.5e9 < found["num_params"] < 13.2e9 and found["bottleneck"] == "compute"
    assert 0.5 < found["peak_share"] < 0.94  # what a block reaches
    assert json.loads(chart.read_text())["traceEvents"]
    disk = ask(capsys, "gpt-13b", "--hardware", "rtx4090+990pro+32GB", "--max-length", "1024",
               "--per-device-train-batch-size", "1")  # fmt: skip
    assert disk["bottleneck"] in ("read", "write") and disk["written_bytes"] > 12 * disk["num_params"] * 0.9
    changes = {item["change"]: item["gain"] for item in disk["helps"]}
    assert changes["--optim adamw_8bit"] > 0.2 and changes["one more drive"] > 0.2


def test_a_step_that_clipping_makes_longer_makes_the_run_longer_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    machine, shape = "rtx4090+2x990pro+128GB", ("--max-length", "1024", "--per-device-train-batch-size", "8")
    found = ask(capsys, "gpt-13b", "--hardware", machine, *shape, "--max-steps", "10")
    assert found["clipped_step_seconds"] > found["step_seconds"]
    assert found["run_seconds"][1] > 10 * found["clipped_step_seconds"]
    assert run(["plan", "gpt-13b", "--hardware", machine, *shape, "--max-steps", "10"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert found["update"] == "overlap" and f"overlap, {found['deferred_units']} units' in the next" in shown
    assert f"{found['tokens'] / found['clipped_step_seconds']:,.0f} where" in shown


def test_more_memory_than_the_machine_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--max-length", "1024", "--per-device-train-batch-size", "1")
    assert run(["plan", "gpt-13b", "--hardware", "lohan-4090", "--host-memory", "10TB", *shape]) == 0
    assert "--host-memory 10TB is more than there is: lohan-4090 has" in " ".join(capsys.readouterr().err.split())


def test_a_drive_that_holds_the_store_and_not_the_trained_model_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    machine, shape = "lohan-4090", ("--max-length", "1024", "--per-device-train-batch-size", "1")
    found = ask(capsys, "gpt-13b", "--hardware", machine, *shape)
    assert not any("trained model" in note for note in found["notes"])
    disk = found["peaks"]["disk"] + found["num_params"]
    found = ask(capsys, "gpt-13b", "--hardware", machine, *shape, "--disk-memory", disk)
    assert found["fits"] and found["phases"]["save"]["disk"] > disk
    assert any("trained model" in note and "--output-dir" in note for note in found["notes"])


def test_rows_are_given_or_chosen_and_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--batch-tokens", "8192", "--per-device-train-batch-size", "4")
    assert run(["plan", "gpt-13b", "--hardware", "lohan-4090", *both]) == 2
    assert "give it or them" in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(
        capsys, "gpt-13b", "--hardware", "lohan-4090", "--per-device-train-batch-size", "128", "--max-length", "1024",
        code=3,
    )  # fmt: skip
    assert not found["fits"] and "device memory: the smallest budget that works is" in found["problem"]
    assert found["helps"][0]["change"].startswith("--per-device-train-batch-size 1 ")


def test_what_moves_to_the_device_leaves_room_in_memory_that_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "gpt-13b", "--hardware", "h200+150GB+990pro", "--max-length", "1024")
    assert found["written_bytes"] == 0 and found["step_seconds"] < 4


def test_device_memory_that_visiting_updates_leave_holds_units_that_live_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = ask(capsys, "gpt-13b", "--hardware", "rtx4090+4x990pro+256GB", "--max-length", "1024")
    assert found["placement"]["states"]["device"] > 0
    assert found["peaks"]["device"] > 0.8 * 24e9


def test_without_a_drive_units_begin_on_the_device_where_memory_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "gpt-10b", "--hardware", "b200+64GB", "--max-length", "1024")["fits"]
    short = ask(capsys, "gpt-13b", "--hardware", "rtx4090+128GB", "--max-length", "1024", code=3)
    assert "a drive (990pro)" in [help_["change"] for help_ in short["helps"]]


def test_a_smaller_batch_is_offered_where_it_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ("--per-device-train-batch-size", "8", "--gradient-accumulation-steps", "32")
    found = ask(capsys, "gpt-13b", "--hardware", "rtx4090+990pro+64GB", "--max-length", "1024", *rows, code=3)
    assert any(help_["change"].endswith("of the batch") for help_ in found["helps"])


def test_the_largest_model_grows_with_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for machine in ("rtx4080+990pro+32GB", "rtx4080+2x990pro+64GB"):
        found = ask(
            capsys, "gpt-13b", "--hardware", machine, "--max-size", "--max-length", "1024",
            "--per-device-train-batch-size", "1",
        )  # fmt: skip
        sizes.append(found["params"])
    assert 13e9 < sizes[0] < sizes[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axis", ("batch", "drives", "host-memory"))
def test_a_sweep_never_gets_slower_with_more(model: Path, capsys: pytest.CaptureFixture[str], axis: str) -> None:
    points = ask(capsys, "gpt-10b", "--hardware", "rtx3090+980pro+64GB", "--max-length", "512",
                 "--per-device-train-batch-size", "1", "--sweep", axis)  # fmt: skip
    speeds = [point["report"]["tokens_per_s"] for point in points if point["report"]["fits"]]
    assert len(speeds) >= 4
    assert all(after >= 0.98 * before for before, after in itertools.pairwise(speeds))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("gpu", "host_gb", "rows"), [("h100", (128, 512), 1), ("l40s", (384,), 2), ("a100-80", (128, 160), 2)]
)
def test_where_updates_visit_the_device_neither_memory_nor_freedom_slows_the_step(
    gpu: str, host_gb: tuple[int, ...], rows: int
) -> None:
    seconds: list[float] = []
    for size in host_gb:
        free = TrainOptions(
            model="gpt-13b", data=(), output_dir="", store=(".",), max_length=1024, max_steps=1,
            per_device_train_batch_size=1, gradient_accumulation_steps=rows,
        )  # fmt: skip
        asks = ask_machine(free, f"{gpu}+4x990pro+{size}GB", Reporter())
        profile, machine = asks.profile(), asks.machine
        seconds.append(asks.plan(machine, profile).step_seconds)
        for forced in ({"activations": "recompute"}, {"update": "serial"}, {"update": "deferred"}):
            other = asked(asks, machine, dataclasses.replace(free, **forced))
            assert seconds[-1] <= 1.05 * other.plan(machine, profile).step_seconds, forced
    assert all(more <= 1.05 * less for less, more in itertools.pairwise(seconds))


def test_this_machine_is_measured_once(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(["probe", "--store", str(tmp_path), "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["hardware"]
    assert rates["device_flops_per_s"] > 1e6 and rates["read_bytes_per_s"] > 1e6
    (cached,) = (tmp_path / "cache" / "spillway").glob("rates-*.json")
    before = cached.stat().st_mtime_ns
    found = ask(capsys, model, "--store", tmp_path, "--max-length", "128")
    assert found["fits"] and cached.stat().st_mtime_ns == before


def test_the_doctor_looks_at_the_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor", "--store", str(tmp_path), "--json"]) == 0
    found = {item["what"]: item for item in json.loads(capsys.readouterr().out)}
    assert f"store {tmp_path}: O_DIRECT" in found and "disk engine" in found
    if Path("/dev/shm").is_dir():
        assert run(["doctor", "--store", "/dev/shm", "--json"]) == 0
        found = {item["what"]: item for item in json.loads(capsys.readouterr().out)}
        assert "RAM disk" in found["store /dev/shm"]["fix"]


def test_wrong_questions_get_one_sentence(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ((model, "--hardware", "rtx4091"), "did you mean rtx4090"),
        (("gpt-14b", "--hardware", "rtx4090"), "there is no shape 'gpt-14b'"),
        ((model, "--hardware", "rtx4090", "--sweep", "colour"), "is not one of batch"),
        (("nowhere/at/all", "--hardware", "rtx4090"), "is not a model directory"),
        ((model, "--hardware", "rtx4090", "--device", "cpu"), "--device is of this machine"),
        ((model, "--hardware", "rtx4090", "--store", "/somewhere"), "--store is of this machine"),
        ((model, "--streams", "0"), "--streams must be at least 1"),
        (("gpt-13b", "data.jsonl", "--hardware", "rtx4090"), "a shape without a tokenizer"),
        ((model, "--hardware", "a100"), "did you mean a100-40 or a100-80"),
        ((model, "--hardware", "rtx4090+128"), "write memory as 128GB"),
        ((model, "--hardware", "rtx4090+pcie6"), "did you mean pcie5"),
    ):
        assert run(["plan", *map(str, arguments)]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_batch_in_tokens_is_cut_so_that_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "gpt-13b", "--hardware", "lohan-4090", "--batch-tokens", 131072, "--max-length", "1024")
    assert (found["fits"], found["rows"], found["tokens"]) == (True, 128, 131072)
    assert 1 <= found["micro_rows"] < 128
    assert run(["plan", "gpt-13b", "--hardware", "lohan-4090", "--batch-tokens", "100", "--max-length", "1024"]) == 2


def test_another_planner_is_asked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("gpt-13b", "--hardware", "lohan-4090", "--per-device-train-batch-size", 2,
              "--gradient-accumulation-steps", 4, "--max-length", "512")  # fmt: skip
    ours, theirs = (ask(capsys, *common, "--policy", policy) for policy in ("auto", "zero-infinity"))
    assert theirs["policy"] == "zero-infinity"
    assert set(theirs["placement"]["states"]) == {"disk"}
    assert ours["tokens_per_s"] > theirs["tokens_per_s"]


@pytest.mark.parametrize(
    ("flag", "size"), [("--host-memory", "1GB"), ("--device-memory", "100MB"), ("--disk-memory", "5GB")]
)
def test_a_budget_that_is_too_small_is_answered_with_one_that_is_enough(
    capsys: pytest.CaptureFixture[str], flag: str, size: str
) -> None:
    common = ("gpt-13b", "--hardware", "rtx4090+4x990pro+64GB", "--max-length", "1024")
    found = ask(capsys, *common, flag, size, code=3)
    option = flag.removeprefix("--").replace("-", "_")
    assert f"there is {size[:-2]}.00 {size[-2:]} ({option}" in found["problem"]
    help_ = found["helps"][0]
    assert help_["change"].startswith(flag)
    assert ask(capsys, *common, *help_["change"].split())["fits"]


def test_dollars_are_a_range_of_time_and_wear_is_a_matter_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "gpt-13b", "--hardware", "lohan-4090", "--max-length", "1024", "--max-steps", "1000")
    low, high = found["dollars_per_run"]
    seconds = found["run_seconds"]
    assert 0 < low < high < low * seconds[1] / seconds[0]
    on_gpu = 1600 / (3 * 365 * 24 * 3600)
    assert high - low == pytest.approx(on_gpu * (seconds[1] - seconds[0]), rel=0.5)
    tokens = 1000 * found["tokens"] / 1e6
    assert [tokens * end for end in found["dollars_per_million_tokens"]] == pytest.approx([low, high])


def test_moving_activations_has_an_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    points = ask(capsys, "gpt-13b", "--hardware", "lohan-4090", "--per-device-train-batch-size", "8",
                 "--gradient-accumulation-steps", "4", "--max-length", "1024", "--sweep", "swapped",
                 "--policy", "lohan")  # fmt: skip
    seconds = [point["report"]["step_seconds"] for point in points]
    assert len(points) >= 5
    assert min(seconds) < 0.9 * seconds[0]


def test_the_step_is_drawn_with_its_memory(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "step.json"
    found = ask(capsys, model, "--hardware", "rtx3090+980pro+64GB", "--weights", "disk", "--chart", chart)
    events = json.loads(chart.read_text())["traceEvents"]
    device = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == "device memory"]
    assert len(device) > 2
    assert max(device) <= found["peaks"]["device"]
    assert set(found["phases"]) == {"load", "step", "evaluation", "save", "export"}


def test_a_chart_that_cannot_be_drawn_is_refused_before_planning(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for chart, why in (("step.gif", "must end in .json"), ("nowhere/step.png", "cannot be written")):
        asked = ["plan", str(model), "--hardware", "rtx3090+980pro+64GB", "--chart", str(tmp_path / chart)]
        assert run(asked) == 2
        assert why in capsys.readouterr().err


def test_python_gives_the_same_answer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, model, "--hardware", "rtx3090+980pro+64GB", "--max-steps", "10")
    report = spillway.predict(str(model), "rtx3090+980pro+64GB", max_steps=10)
    assert to_json(report) == found


def test_one_path_from_python_is_one_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[TrainOptions] = []
    monkeypatch.setattr(answer, "ask", lambda options, *_: asked.append(options))
    monkeypatch.setattr(answer, "answer", lambda _: None)
    for store, data in ((tmp_path, tmp_path / "a.jsonl"), (str(tmp_path), str(tmp_path / "a.jsonl"))):
        spillway.predict("gpt-13b", store=store, data=data)
    spillway.predict("gpt-13b", store=[tmp_path], data=[tmp_path / "a.jsonl"])
    spillway.predict("gpt-13b")
    expected = [((str(tmp_path),), (str(tmp_path / "a.jsonl"),))] * 3 + [((".",), ())]
    assert [(options.store, options.data) for options in asked] == expected


def test_a_model_that_streams_is_not_planned_once_more() -> None:
    model, _ = spillway.prepare(models.llama(), spillway.AdamW(), device="cpu")
    with pytest.raises(spillway.UsageError, match="streams already: ask predict before prepare"):
        spillway.predict(model, example=models.batch("llama", 0))
    spillway.close(model)


def test_an_option_there_is_not_is_told_the_nearest(model: Path) -> None:
    with pytest.raises(spillway.UsageError, match="no option max_lenght; did you mean max_length"):
        spillway.predict(str(model), max_lenght=64)


def test_what_a_run_is_described_by_is_planned(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {model}\noutput_dir: {tmp_path / 'run'}\nmax_length: 32\nper_device_train_batch_size: 3\nseed: 5\n"
    )
    given = ("--config", config, "--hardware", "rtx4090+990pro+64GB")
    assert ask(capsys, *given)["tokens"] == 96
    assert ask(capsys, *given, "--max-length", 16)["tokens"] == 48


def test_any_module_is_planned_with_an_example_and_stays_as_it_is() -> None:
    module = models.dit()
    before = {name: param.clone() for name, param in module.named_parameters()}
    report = spillway.predict(module, "rtx3090+980pro+64GB", example=models.batch("dit", 0), max_steps=10)
    assert report.fits and report.model == "DiT" and report.rows == 4 and report.step_seconds > 0
    assert report.num_params == sum(param.numel() for param in before.values())
    loss = module(**models.batch("dit", 0))
    loss.backward()
    assert all(torch.equal(before[name], param) for name, param in module.named_parameters())
    with pytest.raises(spillway.UsageError, match="example"):
        spillway.predict(module, "rtx3090+980pro+64GB")


class LooksAtValues(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() if x.sum().item() > 0 else self.linear(-x).sum()


def test_a_module_without_tokens_is_planned_too() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    report = spillway.predict(module, "rtx3090+980pro+64GB", example={"input": torch.randn(2, 4)})
    assert report.fits and report.step_seconds > 0 and report.dollars_per_million_tokens == (0, 0)


def test_a_module_that_looks_at_values_is_planned_when_it_trains() -> None:
    with pytest.raises(spillway.UsageError, match="LooksAtValues depends on the values of its tensors.*prepare"):
        spillway.predict(LooksAtValues(), "rtx3090+980pro+64GB", example={"x": torch.ones(2, 8)})


def test_a_model_in_float32_computes_at_the_rate_of_float32(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("gpt-10b", "--hardware", "a100-80+4x990pro+512GB", "--per-device-train-batch-size", "16",
             "--max-length", "1024")  # fmt: skip
    half, full = ask(capsys, *shape), ask(capsys, *shape, "--dtype", "float32")
    assert 8 < full["step_seconds"] / half["step_seconds"] < 312 / 19.5 + 0.1
    assert full["peak_share"] > half["peak_share"]


def test_the_run_has_the_steps_of_the_batch_that_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = directories.make_model(tmp_path / "llama")
    data = directories.make_texts(tmp_path / "texts.jsonl")
    given = (whole, data, "--hardware", "rtx4090+990pro+64GB", "--max-length", "64")
    few = ask(capsys, *given, "--batch-tokens", "64")
    many = ask(capsys, *given, "--batch-tokens", "256")
    assert few["run_steps"] > 4 and many["run_steps"] == -(-few["run_steps"] // 4)


def test_a_drive_more_costs_what_it_costs() -> None:
    machine = find_machine("rtx4090+2x990pro+128GB")
    assert with_drives(machine, 4).price == find_machine("rtx4090+4x990pro+128GB").price > machine.price


def test_twice_the_drives_are_twice_the_mix() -> None:
    machine, twice = find_machine("rtx4090+990pro+t705"), find_machine("rtx4090+2x990pro+2xt705")
    more = with_drives(machine, 4)
    assert more.disk_bytes == twice.disk_bytes and more.endurance_bytes == twice.endurance_bytes
    assert more.hardware.read_bytes_per_s == pytest.approx(twice.hardware.read_bytes_per_s)


def test_saved_points_of_states_in_memory_are_written_too(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (model, "--hardware", "rtx4090+990pro+64GB", "--max-length", "64", "--max-steps", "250")
    found = ask(capsys, *given, "--states", "host", "--weights", "host", "--save-steps", "100")
    assert found["written_bytes"] == 0
    assert found["run_written_bytes"] == pytest.approx(3 * 14 * found["num_params"], rel=0.2)


def test_a_model_that_the_drives_barely_hold_is_updated_in_large_parts() -> None:
    options = TrainOptions("gpt-135b", (), "", (".",), max_length=1024, max_steps=1, per_device_train_batch_size=1)
    question = ask_machine(options, "rtx4080+990pro+64GB", Reporter())
    plan = question.plan(question.machine, question.profile())
    assert plan.placement.keep == IN_PLACE
    assert len(plan.ops) < 50_000  # two million with the smallest parts


def test_on_this_machine_the_process_itself_counts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (model, "--device", "cpu", "--max-length", "64")
    assert process_bytes() < ask(capsys, *given)["peaks"]["host"] < process_bytes() + (1 << 30)
    refused = ask(capsys, *given, "--host-memory", "60MB", code=3)
    assert not refused["fits"] and refused["helps"][0]["change"].startswith("--host-memory ")
