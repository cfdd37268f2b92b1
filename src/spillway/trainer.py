"""The transformers Trainer, and those derived from it, with a model that streams."""

import inspect
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from spillway.api import prepare, save_point, save_pretrained
from spillway.assembly import Prepared, prepared
from spillway.optim.config import Rule, settings_of
from spillway.optim.optimizer import StreamingOptimizer
from spillway.spec.errors import UsageError, required
from spillway.spec.options import TrainOptions

# What the optimizers of TrainingArguments are called here.
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "paged_adamw_32bit": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
    "lion_8bit": "lion_8bit",
    "paged_lion_8bit": "lion_8bit",
    "sgd": "sgd",
}
# Arguments that cannot be followed, and what to do instead.
_REFUSED = {
    "fp16": "load the model in bfloat16 and pass bf16=True, or none of both",
    "fp16_full_eval": "the model computes in the dtype it was loaded in",
    "bf16_full_eval": "the model computes in the dtype it was loaded in",
    "load_best_model_at_end": "leave it out, and load the model from trainer.state.best_model_checkpoint afterwards",
    "auto_find_batch_size": "the plan fits the batch into the memory, or says what is short",
    "torch_compile": "compile the blocks in place before, as in `for block in model.model.layers: block.compile()`",
    "deepspeed": "leave it out, Spillway takes its place",
    "fsdp": "leave it out, Spillway takes its place",
    "optim_args": "give rule=spillway.AdamW(...) with what they say",
    "optim_target_modules": "freeze parameters with requires_grad_(False) before",
    "neftune_noise_alpha": "the embedding streams, and noise that is added behind its back would not be replayed",
}


class TrainerMixin:
    """Makes a class derived from transformers.Trainer stream its model:

        class StreamingSFTTrainer(spillway.TrainerMixin, trl.SFTTrainer): ...

    Besides the trainer's own arguments: `store`, one or more directories on fast drives (by default `store` in the
    output directory), `device_memory`, `host_memory`, `disk_memory` and `micro_batch` as in `spillway.prepare`;
    `rule`: spillway.AdamW, Lion or SGD, in the place of what TrainingArguments say of the optimizer; `placement`:
    further arguments of `spillway.prepare` (update=, activations=, weights=, states=, policy=, or resume=True to
    evaluate what an earlier run has trained).

    The model is one from `spillway.load`, or any in memory. Optimizer, learning rate, weight decay, clipping,
    accumulation and label smoothing are those of TrainingArguments, to the same results. Activations are recomputed or
    kept as the plan says, whatever `gradient_checkpointing` says; bf16=True asks for no autocast: the model computes in
    the dtype it was loaded in.

    A checkpoint is the model as `from_pretrained` loads it and what the trainer keeps besides; optimizer states and
    masters stay in the store. `train(resume_from_checkpoint=True)`, or with the path of the last checkpoint, goes on
    from the last step that was made: of this trainer, if it has trained before, or in the store. That may be later than
    the checkpoint's. Raises UsageError for an earlier checkpoint, for arguments that cannot be followed, and what
    `prepare` does.
    """

    # Of transformers.Trainer, which comes next in the order of classes.
    model: nn.Module
    args: Any
    accelerator: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        store: str | os.PathLike[str] | list[str | os.PathLike[str]] | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk_memory: str | int | None = None,
        micro_batch: int | None = None,
        rule: Rule | None = None,
        placement: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not hasattr(transformers.Trainer, "_init_training_state"):
            raise UsageError(f"spillway.Trainer needs transformers 5.5 or newer: this is {transformers.__version__}")
        self._store = store
        self._where: dict[str, Any] = {
            "device_memory": device_memory,
            "host_memory": host_memory,
            "disk_memory": disk_memory,
            "micro_batch": micro_batch,
            **(placement or {}),
        }
        self._rule = rule
        self._resumes = False
        self._goes_on = False  # from what this trainer has trained, not from a saved point
        self._streaming: StreamingOptimizer | None = None
        super().__init__(*args, **kwargs)
        self._check()
        self.label_smoother = None  # `prepare` is told: the smoother would need whole logits
        self.args._n_gpu = 1  # and not as many times larger batches as there are GPUs
        self._train_batch_size = self.args.train_batch_size

    def _check(self) -> None:
        """Raise UsageError for what cannot be followed; leave recomputation to the plan."""
        for name, instead in _REFUSED.items():
            if getattr(self.args, name, None):
                raise UsageError(f"TrainingArguments({name}={getattr(self.args, name)!r}) cannot stream: {instead}")
        if self.optimizer is not None:
            raise UsageError("optimizers=: leave the optimizer None and give rule=spillway.AdamW(...), or nothing")
        if any(param.dtype is torch.float16 for param in self.model.parameters()):
            raise UsageError("the model is in float16, whose losses this trainer does not scale: load it in bfloat16")
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            if getattr(self.args, name, None):
                setattr(self.args, name, False)

    # Where the model is, and what it is trained with #

    def _stream(self) -> Prepared:
        """The model streams from now on."""
        if self._streaming is None:
            _, self._streaming = prepare(
                self.model,
                self._rule or rule_of(self.args),
                store=self._store or Path(self.args.output_dir) / "store",
                device=self.args.device.type,
                gradient_accumulation_steps=self.args.gradient_accumulation_steps,
                label_smoothing=self.args.label_smoothing_factor,
                **{
                    "param_groups": () if self._rule else self._groups(),
                    "resume": self._resumes,
                    "progress": not self.args.disable_tqdm,
                    **self._where,
                },
            )
        return prepared(self.model)

    @property
    def _trained_steps(self) -> int:
        """Of the weights as they are."""
        return required(self._streaming, "the model does not stream").num_steps

    def _groups(self) -> list[dict[str, Any]]:
        """What decays and what does not, as transformers has it: by names and kinds of modules."""
        decays = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
        trained = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        groups = (
            {"params": [param for name, param in trained if name in decays], "weight_decay": self.args.weight_decay},
            {"params": [param for name, param in trained if name not in decays], "weight_decay": 0.0},
        )
        return [group for group in groups if group["params"]]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The streaming one."""
        self._stream()
        if self.optimizer is None:
            self.optimizer = self._streaming
        found: torch.optim.Optimizer = self.optimizer
        return found

    def create_accelerator_and_postprocess(self) -> None:
        """An accelerator that leaves the model where it is, and in its dtype."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.prepare_model = self._as_it_is

    def _as_it_is(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        if not self.accelerator._models:  # empty it means that every evaluation prepares the model, and says how long
            self.accelerator._models.append(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Its units go there in turn."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        self._stream()
        return model

    # Steps #

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward; the last of the step begins its update."""
        rounds = self._stream().session.rounds
        with rounds.saying(completes=self.accelerator.sync_gradients):
            loss: torch.Tensor = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **more: Any
    ) -> Any:
        """Without logits where only the loss is wanted."""
        session = self._stream().session
        with session.without_logits() if prediction_loss_only else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **more)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """The update does."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Known when the step is over."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        result = self._streaming.last_result if self._streaming is not None else None
        known = None if result is None or result.skipped else result.grad_norm
        super()._maybe_log_save_evaluate(tr_loss, known, *args, **kwargs)  # type: ignore[misc]

    # Checkpoints #

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self._stream()
        target = output_dir or self.args.output_dir
        path = save_pretrained(self.model, target, progress=not self.args.disable_tqdm)
        kept = getattr(self, "processing_class", None) or getattr(
            getattr(self, "data_collator", None), "tokenizer", None
        )
        if kept is not None:
            kept.save_pretrained(path)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        parts = self._stream()
        if parts.points.can_save(parts.session.store):
            save_point(self.model)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights and states are in the store."""
        self._goes_on = self._streaming is not None
        self._resumes = not self._goes_on

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )
        if checkpoint is None:
            return epochs, batches
        points, step = self._stream().points, self._trained_steps
        if not step and self._goes_on:
            raise UsageError(
                f"the model streams already, as it was loaded, and {checkpoint} is of later: make the trainer anew and "
                f'call train first, or give it placement={{"resume": True}}'
            )
        if not step:
            raise UsageError(
                f"{points.directory} holds no saved point to resume {checkpoint} from: optimizer states rest in the "
                f"store, which was moved or removed (store= says where it is)"
            )
        last = get_last_checkpoint(self.args.output_dir)
        if self.state.global_step != step and (last is None or not os.path.samefile(checkpoint, last)):
            raise UsageError(
                f"{checkpoint} is of step {self.state.global_step}, and the optimizer states in {points.directory} are "
                f"of step {step}: resume_from_checkpoint=True goes on from there; to begin anew from an earlier "
                f"checkpoint, load it as the model, with another output_dir"
            )
        self.state.global_step = step
        epochs, batches = divmod(self.state.global_step, num_update_steps_per_epoch)
        skipped = 0 if self.args.ignore_data_skip else batches * self.args.gradient_accumulation_steps
        return epochs, skipped

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As of the checkpoint, and on to the step of the store."""
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None or _follows_a_metric(self.lr_scheduler):
            return
        for _ in range(self.lr_scheduler.last_epoch, self.state.global_step):
            self.lr_scheduler.step()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Those of PyTorch as of the step of the store, which may be later; the others as of the checkpoint. As they
        are where this trainer goes on."""
        if checkpoint is not None and self._goes_on:
            return
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self._stream().points.set_random_state()


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers.Trainer for models that do not fit: see TrainerMixin for what it takes besides."""


def _follows_a_metric(scheduler: Any) -> bool:
    """Whether evaluations move it, as they do ReduceLROnPlateau, and steps do not."""
    return "metrics" in inspect.signature(scheduler.step).parameters


def rule_of(args: transformers.TrainingArguments) -> Rule:
    """What TrainingArguments ask of the optimizer. Raises UsageError for one there is not."""
    asked = str(getattr(args.optim, "value", args.optim))
    if asked not in _OPTIMIZERS:
        raise UsageError(f"TrainingArguments(optim={asked!r}) cannot stream: choose one of {', '.join(_OPTIMIZERS)}")
    name = _OPTIMIZERS[asked]
    return settings_of(
        TrainOptions(
            model="",
            data=(),
            output_dir="",
            optim=name,
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            max_grad_norm=args.max_grad_norm or 0.0,
            adam_beta1=0.0 if name == "sgd" else args.adam_beta1,  # the trainer's has no momentum
            adam_beta2=args.adam_beta2,
            adam_epsilon=args.adam_epsilon,
        )
    )
