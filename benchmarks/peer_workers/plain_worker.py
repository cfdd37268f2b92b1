"""Plain PyTorch, everything in memory: bfloat16 weights, fp32 masters, fused AdamW, clipping.

`plain_worker.py MODEL ROWS LENGTH STEPS recompute|keep`: what becomes of activations.
"""

import sys

import torch
from common import run
from torch import nn
from transformers import AutoModelForCausalLM

model_directory, rows, length, steps, activations = sys.argv[1:6]
model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16)
model.config.use_cache = False
if activations == "recompute":
    model.gradient_checkpointing_enable()
model.train()
params = list(model.parameters())
masters = [nn.Parameter(param.detach().float()) for param in params]
wide = [torch.empty_like(master) for master in masters]
for master, grad in zip(masters, wide, strict=True):
    master.grad = grad
optimizer = torch.optim.AdamW(masters, lr=2e-5, weight_decay=0.0, fused=True)


def step(ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for param, grad in zip(params, wide, strict=True):
        grad.copy_(param.grad)
        param.grad = None
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)
    return float(loss.detach())


run(step, int(rows), int(length), int(steps))
