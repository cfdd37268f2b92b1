"""Plain PyTorch and what it brings: `torch_worker.py '{"how": "plain"|"ideal"|"fsdp2"|"torchao", ...}'`.

plain: everything on the device, bfloat16 weights, fp32 masters, fused AdamW, clipping, blocks recomputed. ideal:
forward and backward of so many layers on the device, whose activations are kept, and no update, micro-batch by
micro-batch: what no offloading can beat. fsdp2: fully_shard with CPUOffloadPolicy on one rank. torchao:
CPUOffloadOptimizer around fused AdamW; without clipping, for its gradients are on their way to the host before backward
is over.
"""

import json
import os
import sys

import torch
from gpu_common import make_model, run
from torch import nn

given = json.loads(sys.argv[1])
how, device, micro = given["how"], given["device"], given["micro"] or given["rows"]
if device == "cuda":
    whole = torch.cuda.get_device_properties(0).total_memory
    if how != "ideal":
        torch.cuda.set_per_process_memory_fraction(min(given["device_bytes"] / whole, 1.0))
model = make_model(given["shape"], "cpu" if how == "fsdp2" else device, given.get("layers"))
model.train()
if how != "ideal":
    model.gradient_checkpointing_enable()
params = [param for param in model.parameters() if param.requires_grad]


def backward(ids: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), device=ids.device)
    for part in ids.split(micro):
        loss = model(input_ids=part, labels=part).loss * (len(part) / len(ids))
        loss.backward()
        total += loss.detach()
    return total


if how == "ideal":

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = backward(ids)
        for param in params:
            param.grad = None
        return loss

elif how == "plain":
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = backward(ids)
        for param, master in zip(params, masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_([*params], [*masters])
        return loss

elif how == "fsdp2":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29513", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    torch.set_default_device(None)
    model.float()  # sharded parameters and states in fp32, computed in bfloat16: as its documentation has it
    offload, cast = CPUOffloadPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (*model.model.layers, model):
        fully_shard(part, offload_policy=offload, mp_policy=cast)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = backward(ids)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

elif how == "torchao":
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(params, torch.optim.AdamW, lr=1e-5, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = backward(ids)
        optimizer.step()
        optimizer.zero_grad()
        return loss

else:
    raise SystemExit(f"{how} is nothing this worker knows")

run(step, given["rows"], given["shape"], device, given["seconds"])
