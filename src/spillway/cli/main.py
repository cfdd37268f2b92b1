"""The `spillway` command and its exit codes."""

import errno
import json
import sys
from contextlib import suppress

import click

import spillway
from spillway.cli.data import data_command
from spillway.cli.export import export_command
from spillway.cli.plan import doctor_command, plan_command, probe_command
from spillway.cli.report import report_command
from spillway.cli.stopped import CODE, STOPPED
from spillway.cli.train import train_command
from spillway.cli.verify import verify_command
from spillway.spec.errors import SpillwayError
from spillway.spec.words import as_flags

# What other tools call options of ours.
_MEANT = {
    "--bf16": "--dtype bfloat16 (the default)",
    "--fp16": "--dtype float16",
    "--lr": "--learning-rate",
    "--epochs": "--num-train-epochs",
    "--batch-size": "--per-device-train-batch-size",
    "--steps": "--max-steps",
    "--seq-length": "--max-length",
    "--max-seq-length": "--max-length",
    "--gradient-checkpointing": "--activations (the plan decides by default)",
    "--resume": "the same command again (it resumes by itself)",
    "--offload": "--weights and --states (the plan decides by default)",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(spillway.__version__)
def cli() -> None:
    """Fine-tune every parameter of models that overflow your GPU.

    \b
    spillway train MODEL DATA... -o RUN     fine-tune; run it again to go on
    spillway plan MODEL                     will it fit, how fast, what would help
    spillway probe, spillway doctor         measure this machine; what is missing or slow
    spillway data DATA... --model MODEL     see what will be trained, before it is
    spillway report RUN...                  what a run has done so far; several beside each other
    spillway export RUN DIRECTORY           write a saved point as a Hugging Face model
    spillway verify RUN                     check saved points, and the arithmetic against plain PyTorch

    \b
    Exit codes: 0 ok, 2 usage or data, 3 does not fit, 4 host memory, 5 disk, 6 not finite,
    130 interrupted and saved; 1 a verification failed.
    """


cli.add_command(train_command)
cli.add_command(data_command)
cli.add_command(export_command)
cli.add_command(verify_command)
cli.add_command(report_command)
cli.add_command(plan_command)
cli.add_command(probe_command)
cli.add_command(doctor_command)


def run(arguments: list[str]) -> int:
    """Run a command line; its exit code. Errors are one sentence on standard error."""
    try:
        code = cli.main(args=arguments, prog_name="spillway", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SpillwayError as error:
        return _fail(as_flags(str(error)), error.exit_code, arguments)
    except click.NoSuchOption as error:
        meant = _MEANT.get(error.option_name)
        said = f"No such option '{error.option_name}'. Did you mean {meant}?" if meant else error.format_message()
        return _fail(said, 2, arguments)
    except click.ClickException as error:
        return _fail(error.format_message(), 2, arguments)
    except (click.Abort, KeyboardInterrupt):
        return _fail(STOPPED if arguments[:1] == ["train"] else "stopped", CODE, arguments)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "free some space or choose another place" if full else "look at that place, or choose another"
        return _fail(f"{where}{error.strerror or error}: {what}", 5, arguments)
    except MemoryError:
        return _fail("there is not enough host memory: give a smaller --host-memory", 4, arguments)
    except RuntimeError as error:
        from spillway.runtime.room import as_memory_error  # imports torch

        told = as_memory_error(error, "a step")
        if told is None:
            raise
        return _fail(as_flags(str(told)), told.exit_code, arguments)


def _fail(message: str, code: int, arguments: list[str]) -> int:
    if "--json" in arguments:
        with suppress(OSError):  # standard output may be what has no room
            print(json.dumps({"error": message, "exit_code": code}), flush=True)
    print(f"spillway: {message}", file=sys.stderr)
    return code
