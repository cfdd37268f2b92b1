"""The environment the peers run in: made once, by pip, beside ours and never in it."""

import subprocess
import sys
from pathlib import Path

import torch

DIRECTORY = Path.home() / ".cache" / "spillway" / "peers"
PACKAGES = ("deepspeed==0.19.8", "accelerate", "ninja", "transformers", "psutil")


def interpreter(directory: Path = DIRECTORY) -> str:
    """The Python of an environment with this PyTorch and the peers, which is made where it is missing. DeepSpeed
    compiles its operators at first use: that takes a C++ compiler and the headers of libaio. Raises
    CalledProcessError where pip fails."""
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        print(f"setting up the peers in {directory}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"torch=={torch.__version__.split('+')[0]}"], check=True)
        subprocess.run([*pip, *PACKAGES], check=True)
        (directory / "complete").touch()
    return str(python)
