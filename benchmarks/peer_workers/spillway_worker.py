"""Ours: `spillway_worker.py MODEL STORE ROWS LENGTH STEPS PLACE MOMENTS [MEMORY] [DISK]`.

PLACE is that of weights and of states (host,disk), or of both (disk); MOMENTS float32, 8bit or 8bit-24 (24-bit masters,
too); MEMORY and DISK in bytes.
"""

import sys
from pathlib import Path

import torch
from common import run
from transformers import AutoModelForCausalLM

import spillway

model_directory, store, rows, length, steps, place, states, memory, disk = (*sys.argv[1:10], "", "")[:9]
moments, _, masters = states.partition("-")
weights_place, _, states_place = place.partition(",")
settings = spillway.AdamW(lr=2e-5, weight_decay=0.0, max_grad_norm=1.0, moments=moments, master_bits=int(masters or 32))
model = spillway.load(model_directory, AutoModelForCausalLM)
model, optimizer = spillway.prepare(
    model,
    settings,
    store=Path(store) / "spillway",
    device="cpu",
    weights=weights_place,
    states=states_place or weights_place,
    host_memory=memory or None,
    disk_memory=disk or None,
)
model.train()


def step(ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


run(step, int(rows), int(length), int(steps))
