"""DeepSpeed ZeRO-3 on its CPU accelerator:
`deepspeed_worker.py MODEL STORE ROWS LENGTH STEPS cpu|nvme recompute|keep [wide|tight]`.

Settings as its documentation advises for NVMe (pipelined optimizer swapping, 1 MiB blocks, deep queues), buffers sized
to this model; `tight` ones, as few and as small as a block of the model allows, where memory decides. Parameters are
partitioned to where they are offloaded while the model loads, through the integration that transformers has for it.
"""

import os
import sys
from typing import Any

os.environ.update(
    DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
    LOCAL_SIZE="1",
)  # fmt: skip

import deepspeed
import torch
from common import run
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

model_directory, store, rows, length, steps, place, activations = sys.argv[1:8]
is_tight = sys.argv[8:] == ["tight"]
deepspeed.init_distributed("gloo")
shape = AutoConfig.from_pretrained(model_directory)
largest = max(shape.vocab_size, shape.intermediate_size) * shape.hidden_size  # parameters of one matrix
param: dict[str, Any] = {"device": place}
states: dict[str, Any] = {"device": place}
if place == "nvme":
    size = max(largest, 1_000_000) if is_tight else max(20_000_000, largest)
    param |= {"nvme_path": store, "buffer_count": 5 if is_tight else 6, "buffer_size": size, "pin_memory": False}
    states |= {"nvme_path": store, "buffer_count": 4 if is_tight else 16}
    states |= {"pipeline_read": not is_tight, "pipeline_write": not is_tight}
config = {
    "train_micro_batch_size_per_gpu": int(rows),
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": param,
        "offload_optimizer": states,
        "sub_group_size": largest if is_tight else 50_000_000,
        "reduce_bucket_size": largest if is_tight else 500_000_000,
        "stage3_prefetch_bucket_size": 0 if is_tight else 20_000_000,
        "stage3_max_live_parameters": 0 if is_tight else 60_000_000,
        "stage3_max_reuse_distance": 0 if is_tight else 1_000_000_000,
        "stage3_param_persistence_threshold": 10_000,
    },
    "aio": {
        "block_size": 1 << 20,
        "queue_depth": 32,
        "intra_op_parallelism": 2,
        "single_submit": False,
        "overlap_events": True,
    },
    "steps_per_print": 10**9,
}
integration = HfDeepSpeedConfig(config)  # read by `from_pretrained` while it lives
model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16)
model.config.use_cache = False
if activations == "recompute":
    model.gradient_checkpointing_enable()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


def step(ids: torch.Tensor) -> float:
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


run(step, int(rows), int(length), int(steps))
