"""Lanes and the process they are in."""

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys, time
import torch
import models, spillway
from spillway.runtime.lanes import LaneWorker

def fetch_slowly(self, op, home):
    fetch(self, op, home)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        there.copy_(here)

def stop(module, args):
    if type(args[0]) is torch.Tensor:  # not while the forward is profiled
        raise SystemExit(3)

here = torch.ones(1 << 20)
there = torch.empty_like(here)
fetch, LaneWorker._upload_weight = LaneWorker._upload_weight, fetch_slowly
model, _ = spillway.prepare(
    models.llama(), spillway.AdamW(), store=sys.argv[1], device="cpu", weights="disk", states="disk"
)
model.model.layers[0].register_forward_pre_hook(stop)
model(**models.batch("llama", 0))
"""


def test_a_script_that_ends_while_lanes_work_ends_with_its_own_code(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], cwd=tests, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, "")


_FORKING = """
import os, sys
import torch
import models, spillway

model, _ = spillway.prepare(models.llama(), spillway.AdamW(), store=sys.argv[1], device="cpu")
model(**models.batch("llama", 0))
child = os.fork()
if child == 0:
    sys.exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_that_ends_waits_for_no_lanes(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-W", "ignore", "-c", _FORKING, str(tmp_path)]
    ended = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, "4"), ended.stderr
