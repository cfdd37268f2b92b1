"""Options of `spillway train`, made from TrainOptions: one place for names and defaults."""

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click
import yaml

# Name -> help. The first page shows these; --help-all shows the rest too.
FIRST_PAGE = {
    "output_dir": "Run directory: plan, metrics, store, final model.",
    "store": "Directory on a fast drive for weights and optimizer states; repeat for more drives. Default: in the run.",
    "device": "auto, cuda (or cuda:1, ...) or cpu.",
    "device_memory": "GPU memory that may be used, e.g. 24GB. Default: what is free.",
    "host_memory": "Host memory that may be used, e.g. 64GB. Default: nine tenths of what is free.",
    "disk_memory": "Disk space that may be used, e.g. 1TB. Default: what is free.",
    "learning_rate": "Peak learning rate.",
    "num_train_epochs": "Passes over the data.",
    "max_steps": "Optimizer steps; overrides the epochs.",
    "max_length": "Tokens per row, at most the model's positions; longer texts continue in the next row.",
    "per_device_train_batch_size": "Rows computed at a time (the micro-batch).",
    "gradient_accumulation_steps": "Multiply the rows per step by this; weights still move only once per step.",
    "eval_data": "Held-out data, in the same formats; its loss is shown every --eval-steps and at the end.",
    "save_steps": "Steps between saved points of states in host memory; with states on disk every step is one.",
    "resume_from_checkpoint": "Fail if there is no saved point. (Running the same command again resumes by itself.)",
}
MORE = {
    "eval_steps": "Steps between evaluations of --eval-data.",
    "save_total_limit": "Saved points to keep, older ones for damage. 0: only one at a stop, half the disk.",
    "max_grad_norm": "Clip by the exact global norm; 0 turns clipping off and lets updates overlap backward.",
    "clip_by": "norm, unit (each block by its own norm) or value (each element), within --max-grad-norm.",
    "loss_scale": "auto (dynamic for float16), dynamic, or a number.",
    "optim": "adamw (exact), adamw_bf16, adamw_8bit (half the bytes), lion, lion_8bit, sgd.",
    "master_bits": "32 (exact) or 24, for bfloat16 weights.",
    "weight_decay": "Decoupled weight decay; norms and biases are never decayed.",
    "adam_beta1": "AdamW's and Lion's beta 1; the momentum of sgd.",
    "adam_beta2": "AdamW's beta 2.",
    "adam_epsilon": "AdamW's epsilon.",
    "warmup_ratio": "Share of the steps in which the learning rate rises.",
    "lr_scheduler_type": "linear, cosine, constant, ... as in transformers.",
    "seed": "Seed of the data order and of dropout.",
    "packing": "Put several samples in a row; none sees the others. Off where the model cannot keep them apart.",
    "dtype": "bfloat16 or float16 (with fp32 masters; float16 with loss scaling), or float32.",
    "update": "auto, serial, overlap-naive, overlap or deferred: when weights are updated.",
    "activations": "auto, recompute, tape (keep products and attention), or keep all: keep (GPU), host or disk.",
    "weights": "auto, device, host or disk: where weights are stored.",
    "states": "auto, device, host or disk: where optimizer states are stored.",
    "policy": "auto, or plan as another system would: lohan, fuyou, stronghold, zero-infinity, ... (see README).",
    "streams": "Micro-batches a GPU computes side by side. Default: as many as fit in its memory, up to 4.",
    "label_smoothing_factor": "How much of each label is spread over the whole vocabulary.",
    "non_finite": "stop or skip a batch whose loss or gradients are not finite; five in a row always stop.",
    "max_writes": "Save and stop once this run has written this much to any drive, e.g. 50TB.",
    "allow_pickle": "Read .bin weights if a model has no safetensors.",
}
# The kinds of values that a config file may set an option of a type to, and their name; numbers are also strings, for
# YAML has 2e-5 as one.
_TAKES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int, str), "a whole number"),
    int | None: ((int, str), "a whole number"),
    float: ((int, float, str), "a number"),
}


def add_options(options_class: Any, names: Collection[str] = ()) -> Callable[[Any], Any]:
    """A decorator that gives a click command an option for every field of the dataclass, or for those of `names`."""
    hints = typing.get_type_hints(options_class)
    fields = {field.name: field for field in dataclasses.fields(options_class)}

    def decorate(command: Any) -> Any:
        for name, text in reversed({**FIRST_PAGE, **MORE}.items()):
            if not names or name in names:
                hidden = not names and name not in FIRST_PAGE
                command = _option(name, hints[name], fields[name].default, text, hidden)(command)
        return command

    return decorate


def _option(name: str, hint: Any, default: Any, text: str, hidden: bool) -> Callable[[Any], Any]:
    flag = "--" + name.replace("_", "-")
    shown: dict[str, Any] = {"help": text, "hidden": hidden}
    if hint is bool:
        names = (f"{flag}/--no-{flag[2:]}",) if default else (flag,)
        return click.option(*names, name, default=default, is_flag=True, **shown)
    if hint == tuple[str, ...]:
        return click.option(flag, name, multiple=True, metavar="PATH", **shown)
    if name == "output_dir":
        return click.option("-o", flag, name, required=True, metavar="RUN", **shown)
    kind = {int: int, int | None: int, float: float}.get(hint, str)
    show_default = default not in (None, -1)
    return click.option(flag, name, default=default, type=kind, show_default=show_default, **shown)


def config_option(options_class: Any) -> Callable[[Any], Any]:
    """A decorator that gives a click command --config, whose values stand for options (and arguments) that are not
    given; those of the dataclass that the command does not have are left alone."""

    def use(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            context.default_map = read_config(Path(value), options_class)

    text = "YAML or TOML with option names."
    return click.option("--config", callback=use, is_eager=True, expose_value=False, metavar="FILE", help=text)


def read_config(path: Path, options_class: Any) -> dict[str, Any]:
    """Values of a YAML or TOML file with the option names (dashes or underscores).

    Raises click.UsageError for a file that cannot be read, or an unknown name, with the nearest one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise click.UsageError(f"the config file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"the config file {path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        first = " ".join(str(error).split())
        raise click.UsageError(f"the config file {path} is malformed: {first}") from error
    if not isinstance(values, dict):
        raise click.UsageError(f"the config file {path} must hold names and values, such as learning_rate: 2e-5")
    known = [field.name for field in dataclasses.fields(options_class)]
    hints = typing.get_type_hints(options_class)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"the config file {path} sets '{key}', which is no option{hint}")
        several = hints[name] == tuple[str, ...]
        for item in value if several and isinstance(value, list) else [value]:
            _refuse_other_kind(path, key, item, str if several else hints[name])
        found[name] = [value] if several and isinstance(value, str) else value
    return found


def _refuse_other_kind(path: Path, key: str, value: Any, hint: Any) -> None:
    """Raise click.UsageError for what an option would silently make something else of: 2.7 steps, true as a rate."""
    kinds, name = _TAKES.get(hint, ((str, int, float), "text"))
    if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool)):
        raise click.UsageError(
            f"the config file {path} sets {key} to {json.dumps(value, default=str)}, which is not {name}"
        )
