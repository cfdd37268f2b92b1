"""The transformers Trainer with a model that streams does what it does with one in memory."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

import spillway
from models import VOCAB, batch, gpt2, llama, t5
from spillway.api import read_parameters
from spillway.trainer import rule_of

DISK = {"weights": "disk", "states": "disk"}


def samples(count: int, length: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, VOCAB, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(directory: Path, **more: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **more,
    }
    return TrainingArguments(output_dir=str(directory), **settings)


@contextmanager
def streaming(model: nn.Module, directory: Path, data: Any, **more: Any) -> Iterator[spillway.Trainer]:
    """One of ours, whose store is released at the end."""
    ours = {name: more.pop(name) for name in ("placement", "rule", "store", "callbacks") if name in more}
    trainer = spillway.Trainer(
        model=model, args=arguments(directory, **more), train_dataset=data, eval_dataset=samples(3), **ours
    )
    try:
        yield trainer
    finally:
        spillway.close(model)


def told(trainer: transformers.Trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", [{}, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("accumulation", [1, 2])  # of 7 batches: the last step of an epoch has one alone
def test_a_run_is_that_of_the_plain_trainer(accumulation: int, placement: dict[str, str], tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation,
        "eval_strategy": "epoch",
        "label_smoothing_factor": 0.1,
    }
    model = llama()
    plain = transformers.Trainer(
        model=copy.deepcopy(model),
        args=arguments(tmp_path / "plain", **more),
        train_dataset=samples(14),
        eval_dataset=samples(3),
    )
    plain.train()
    with streaming(model, tmp_path / "ours", samples(14), placement=placement, **more) as ours:
        ours.train()
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
            assert told(ours, name) == pytest.approx(told(plain, name), rel=1e-5)
        assert [set(line) for line in ours.state.log_history] == [set(line) for line in plain.state.log_history]
        expected = dict(plain.model.named_parameters())
        for name, param in read_parameters(model).items():
            torch.testing.assert_close(param, expected[name].data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accumulation", (1, 2))
def test_a_model_that_divides_its_loss_itself_is_smoothed_as_by_the_plain_trainer(
    accumulation: int, tmp_path: Path
) -> None:
    def run(kind: type, directory: str, **more: Any) -> list[float]:
        args = transformers.Seq2SeqTrainingArguments(
            str(tmp_path / directory),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            learning_rate=1e-3,
            label_smoothing_factor=0.1,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = kind(model=t5(), args=args, train_dataset=rows, data_collator=with_decoder_inputs, **more)
        trainer.train()
        spillway.close(trainer.model) if more else None
        return told(trainer, "loss")

    rows = [{name: tensor[index] for name, tensor in batch("t5", 0, 8).items()} for index in range(8)]
    expected = run(transformers.Seq2SeqTrainer, "plain")
    assert run(Seq2Seq, "ours", placement={"states": "host"}) == pytest.approx(expected, rel=1e-5)


class Seq2Seq(spillway.TrainerMixin, transformers.Seq2SeqTrainer):
    """One that evaluates by generating."""


def with_decoder_inputs(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    start = torch.zeros(len(rows), 1, dtype=torch.long)
    return {**found, "decoder_input_ids": torch.cat([start, found["labels"][:, :-1].clamp(min=0)], 1)}


class _StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("save_steps", "placement", "goes_on_after"),
    [(3, DISK, 5), (3, {}, 3), (4, {}, 4)],
    ids=["disk", "memory", "memory-between-epochs"],
)
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(
    save_steps: int, placement: dict[str, str], goes_on_after: int, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"placement": placement, "save_strategy": "steps", "save_steps": save_steps}
    model = gpt2(dropout=0.1)
    with streaming(model, tmp_path / "whole", samples(8), **more) as whole:
        whole.train()
        expected, losses = read_parameters(model), told(whole, "loss")
    model = gpt2(dropout=0.1)
    stopped = streaming(model, tmp_path / "cut", samples(8), callbacks=[_StopAfter(5)], **more)
    with stopped as cut, pytest.raises(KeyboardInterrupt):
        cut.train()
    model = gpt2(dropout=0.1)
    with streaming(model, tmp_path / "cut", samples(8), **more) as again:
        again.train(resume_from_checkpoint=True)
        assert told(again, "loss")[save_steps:] == losses[goes_on_after:]
        for name, param in read_parameters(model).items():
            assert torch.equal(param, expected[name]), name


def test_a_trainer_that_was_interrupted_goes_on_from_where_it_is(tmp_path: Path) -> None:
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    model = gpt2()
    with streaming(model, tmp_path / "whole", samples(8), **more) as whole:
        whole.train()
        expected, losses = read_parameters(model), told(whole, "loss")
    model = gpt2()
    with streaming(model, tmp_path / "cut", samples(8), callbacks=[_StopAfter(5)], **more) as cut:
        with pytest.raises(KeyboardInterrupt):
            cut.train()
        cut.remove_callback(_StopAfter)
        cut.train(resume_from_checkpoint=True)
        assert cut.state.global_step == 8
        assert told(cut, "loss")[3:] == losses[5:]
        for name, param in read_parameters(model).items():
            assert torch.equal(param, expected[name]), name


def test_only_the_last_checkpoint_can_be_gone_on_from(tmp_path: Path) -> None:
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "placement": DISK}
    stopped = streaming(gpt2(), tmp_path, samples(8), callbacks=[_StopAfter(7)], **more)
    with stopped as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train()
    told = r"checkpoint-2 is of step 2, and the optimizer states .* step 7"
    with streaming(gpt2(), tmp_path, samples(8), **more) as again, pytest.raises(spillway.UsageError, match=told):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with streaming(gpt2(), tmp_path, samples(8), **more) as again:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        assert again.state.global_step == 8


def test_a_model_that_streams_untrained_is_not_taken_for_the_trained_one(tmp_path: Path) -> None:
    with streaming(gpt2(), tmp_path, samples(8), save_strategy="epoch", store=tmp_path / "first") as trainer:
        trainer.train()
    with streaming(gpt2(), tmp_path, samples(8), store=tmp_path / "second") as again:
        again.evaluate()
        with pytest.raises(spillway.UsageError, match="streams already, as it was loaded"):
            again.train(resume_from_checkpoint=True)


def test_an_interrupted_run_whose_learning_rate_follows_evaluations_goes_on(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "learning_rate": 5e-2,
    }
    with streaming(gpt2(), tmp_path / "whole", samples(8), **more) as whole:
        whole.train()
    stopped = streaming(gpt2(), tmp_path / "cut", samples(8), callbacks=[_StopAfter(5)], **more)
    with stopped as cut, pytest.raises(KeyboardInterrupt):
        cut.train()
    with streaming(gpt2(), tmp_path / "cut", samples(8), **more) as again:
        again.train(resume_from_checkpoint=True)
    for name in ("loss", "learning_rate", "eval_loss"):
        assert told(again, name) == told(whole, name)
    assert min(told(whole, "learning_rate")) < 5e-2


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path: Path) -> None:
    model = llama()
    with streaming(model, tmp_path, samples(4), save_strategy="epoch", num_train_epochs=1) as trainer:
        trainer.train()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
        expected = read_parameters(model)
        assert all(torch.equal(param, expected[name]) for name, param in loaded.named_parameters())


def test_resuming_without_the_store_says_what_is_missing(tmp_path: Path) -> None:
    with streaming(llama(), tmp_path, samples(4), save_strategy="epoch", store=tmp_path / "first") as trainer:
        trainer.train()
    elsewhere = streaming(llama(), tmp_path, samples(4), store=tmp_path / "second")
    with elsewhere as again, pytest.raises(spillway.UsageError, match="second holds no saved point to resume .* from"):
        again.train(resume_from_checkpoint=True)


def test_evaluation_before_training_streams(tmp_path: Path) -> None:
    model = llama()
    plain = transformers.Trainer(
        model=copy.deepcopy(model), args=arguments(tmp_path / "plain"), eval_dataset=samples(3)
    )
    with streaming(model, tmp_path, samples(4)) as ours:
        assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def test_the_rule_given_takes_the_place_of_the_arguments(tmp_path: Path) -> None:
    with streaming(llama(), tmp_path, samples(4), rule=spillway.SGD(lr=0.25)) as trainer:
        assert trainer.create_optimizer().param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}, "load_best_model"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused(more: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(spillway.UsageError, match=text):
        spillway.Trainer(model=llama(), args=arguments(tmp_path, **more), eval_dataset=samples(2))


@pytest.mark.parametrize(
    ("optim", "rule"),
    [
        ("adamw_torch_fused", spillway.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=None)),
        (
            "paged_lion_8bit",
            spillway.Lion(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=None, moments="8bit"),
        ),
        ("sgd", spillway.SGD(lr=1e-3, momentum=0.0, weight_decay=0.1, max_grad_norm=None)),
    ],
)
def test_the_arguments_say_what_the_optimizer_is(optim: str, rule: object, tmp_path: Path) -> None:
    assert rule_of(arguments(tmp_path, optim=optim, adam_beta2=0.95, max_grad_norm=0.0)) == rule


def test_an_optimizer_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    trainer = spillway.Trainer(model=llama(), args=arguments(tmp_path, optim="adafactor"), train_dataset=samples(4))
    with pytest.raises(spillway.UsageError, match="optim='adafactor'.* adamw_torch"):
        trainer.train()


class Biased(nn.Module):
    """Parameters whose names and shapes say different things of whether they decay."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sinks = nn.Parameter(torch.zeros(8))
        self.down_proj_bias = nn.Parameter(torch.zeros(4, 8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        found = self.model(input_ids=input_ids, labels=labels)
        return {"loss": found.loss + (self.sinks * 0.1).sum() + (self.down_proj_bias * 0.1).sum()}


def test_what_decays_is_what_the_plain_trainer_decays(tmp_path: Path) -> None:
    model = Biased(llama())
    nn.init.ones_(model.sinks)
    nn.init.ones_(model.down_proj_bias)
    data = samples(4)
    plain = transformers.Trainer(copy.deepcopy(model), arguments(tmp_path / "plain"), train_dataset=data)
    plain.train()
    with streaming(model, tmp_path / "ours", data) as ours:
        ours.train()
        trained = read_parameters(model)
    for name, param in plain.model.named_parameters():
        torch.testing.assert_close(trained[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)


def test_what_an_earlier_run_trained_is_evaluated(tmp_path: Path) -> None:
    data = samples(8)
    with streaming(llama(), tmp_path, data, placement=DISK) as trainer:
        trainer.train()
        expected = trainer.evaluate()["eval_loss"]
    with streaming(llama(), tmp_path, data, placement={**DISK, "resume": True, "progress": False}) as trainer:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)
