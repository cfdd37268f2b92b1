"""Ours: `spillway_worker.py MODEL STORE ROWS LENGTH STEPS PLACE MOMENTS MEMORY`; MEMORY in bytes, or empty."""

import sys
from pathlib import Path

import torch
from common import run
from transformers import AutoModelForCausalLM

import spillway

model_directory, store, rows, length, steps, place, moments, memory = sys.argv[1:9]
settings = spillway.AdamW(lr=2e-5, weight_decay=0.0, max_grad_norm=1.0, moments=moments)
model = spillway.load(model_directory, AutoModelForCausalLM)
model, optimizer = spillway.prepare(
    model,
    settings,
    store=Path(store) / "spillway",
    device="cpu",
    weights=place,
    states=place,
    host_memory=memory or None,
)
model.train()


def step(ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


run(step, int(rows), int(length), int(steps))
