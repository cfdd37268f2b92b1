"""DeepSpeed ZeRO-3 on the GPU: `zero_worker.py '{"how": "ZeRO-Offload"|"ZeRO-Infinity", ...}'`.

Settings as its documentation and its own performance tests advise: pinned memory, pipelined swapping of states, deep
queues with large blocks, overlapped communication, recomputed blocks, micro-batches accumulated by the engine.
"""

import json
import os
import sys
from typing import Any

os.environ.update(
    MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1"
)

import deepspeed
import torch
from gpu_common import WIDTHS, make_model, run

given = json.loads(sys.argv[1])
device = given["device"]
if device == "cuda":
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(given["device_bytes"] / whole, 1.0))
deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")
hidden, _, _, _, _, vocabulary = WIDTHS[given["shape"]]
place = "nvme" if given["how"] == "ZeRO-Infinity" else "cpu"
param: dict[str, Any] = {"device": place, "pin_memory": device == "cuda"}
states: dict[str, Any] = {"device": place, "pin_memory": device == "cuda"}
if place == "nvme":
    largest = hidden * vocabulary  # the embedding
    param |= {"nvme_path": given["store"], "buffer_count": 6, "buffer_size": int(1.05 * largest)}
    states |= {"nvme_path": given["store"], "buffer_count": 5, "pipeline_read": True, "pipeline_write": True}
micro = given["micro"] or given["rows"]
config = {
    "train_micro_batch_size_per_gpu": micro,
    "gradient_accumulation_steps": given["rows"] // micro,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": param,
        "offload_optimizer": states,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 100_000_000,
    },
    "aio": {
        "block_size": 1 << 20,
        "queue_depth": 32,
        "intra_op_parallelism": 8,
        "single_submit": False,
        "overlap_events": True,
    },
    "steps_per_print": 10**9,
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = make_model(given["shape"], "cpu")
model.gradient_checkpointing_enable()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


def step(ids: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), device=ids.device)
    for part in ids.split(micro):
        loss = engine(input_ids=part, labels=part).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach() * (len(part) / len(ids))
    return total


run(step, given["rows"], given["shape"], device, given["seconds"])
