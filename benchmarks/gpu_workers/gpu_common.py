"""What every worker of benchmarks/gpu.py does alike: the model, the batches, the clock. Prints a JSON line per step."""

import json
import os
import resource
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = int(os.environ.get("LENGTH", "1024"))
SWAPPED = 5  # points of the curve of swapped activations
WIDTHS = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "tiny": (64, 128, 3, 4, 2, 512),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "13b": (5120, 13824, 40, 40, 40, 32000),
    "30b": (6656, 17920, 56, 52, 52, 32000),
}


def make_model(shape: str, device: str, layers: int | None = None) -> LlamaForCausalLM:
    """A Llama of that shape with random bfloat16 weights, made on the device (a minute on a CPU is a second there)."""
    hidden, intermediate, depth, heads, kv_heads, vocabulary = WIDTHS[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max(LENGTH, 2048),
        use_cache=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def flops_per_token(shape: str) -> float:
    """Of forward and backward without recomputation: 6 per parameter of a matrix, and attention's 12 h s per layer
    (half of it is masked away and not counted)."""
    hidden, intermediate, depth, heads, kv_heads, vocabulary = WIDTHS[shape]
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    matrices = depth * (attention + 3 * hidden * intermediate) + hidden * vocabulary
    return 6.0 * matrices + 6.0 * depth * hidden * LENGTH


def make_batch(rows: int, shape: str, device: str, source: torch.Generator) -> torch.Tensor:
    """Random tokens, [rows, LENGTH]."""
    return torch.randint(0, WIDTHS[shape][-1], (rows, LENGTH), generator=source).to(device)


def run(step: Callable[[torch.Tensor], torch.Tensor], rows: int, shape: str, device: str, seconds: float) -> None:
    """Call `step` (which returns the loss) with fresh batches for so long, and print what each took. The device's peak
    is that of the steps, not of making the model."""
    source, began = torch.Generator().manual_seed(0), time.perf_counter()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    number, last = 0, 0.0
    while number < 3 or (number < 12 and time.perf_counter() - began + last < seconds):
        ids = make_batch(rows, shape, device, source)
        start = time.perf_counter()
        loss = float(step(ids).detach())  # waits for the device
        if device == "cuda":
            torch.cuda.synchronize()
        last = time.perf_counter() - start
        number += 1
        peak = torch.cuda.max_memory_reserved() if device == "cuda" else 0
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": last, "loss": loss, "device": peak, "host": host}), flush=True)
