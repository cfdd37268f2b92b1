"""Distils a teacher that does not fit into memory into a student that does (Hinton et al. 2015).

    python examples/demo.py demo && python examples/distill.py demo/llama-128m demo/student --text demo/text

The teacher streams: its weights rest in host memory or, with --store, on drives, and pass through at most
--teacher-memory of the device. The student has a part of the teacher's layers, lies wholly in memory and is trained by
plain PyTorch; a student too large for that goes through spillway.prepare instead, and the loop stays as it is.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import spillway


def batches(directory: Path, tokenizer: AutoTokenizer, rows: int, length: int) -> Iterator[torch.Tensor]:
    """Random pieces of all texts, [rows, length] tokens, without end."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(directory.glob("*.txt"))]
    tokens = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
    while True:
        starts = torch.randint(0, len(tokens) - length, (rows,))
        yield torch.stack([tokens[start : start + length] for start in starts])


def make_student(teacher: Path, layers: int, device: torch.device) -> PreTrainedModel:
    """The teacher's shape with fewer layers and weights of its own."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(teacher, num_hidden_layers=layers)).to(device)


def main() -> None:
    """Train the student, and write it to a directory that from_pretrained loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="a model directory")
    parser.add_argument("output", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a directory of .txt files")
    parser.add_argument("--store", type=Path, help="a directory on a fast drive for a teacher beyond host memory")
    parser.add_argument("--teacher-memory", help="device memory the teacher may use, as in 2GB")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = spillway.load(options.teacher, AutoModelForCausalLM).eval()
    spillway.stream(teacher, store=options.store, device_memory=options.teacher_memory)
    student = make_student(options.teacher, options.layers, device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.learning_rate)

    data = batches(options.text, tokenizer, options.rows, options.length)
    for step in range(1, options.steps + 1):
        start, ids = time.perf_counter(), next(data).to(device)
        with torch.no_grad():
            wanted = log_softmax(teacher(input_ids=ids).logits.float() / options.temperature, -1)
        taught = time.perf_counter()
        found = log_softmax(student(input_ids=ids).logits.float() / options.temperature, -1)
        loss = options.temperature**2 * kl_div(found.flatten(0, 1), wanted.flatten(0, 1), None, None, "batchmean", True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 5 == 0:
            seconds, of_teacher = time.perf_counter() - start, taught - start
            print(f"step {step}: divergence {loss.item():.4f}, {seconds:.2f} s, {of_teacher:.2f} s of them the teacher")
    student.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    spillway.close(teacher)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
