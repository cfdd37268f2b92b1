"""The slow obvious version: plain PyTorch, everything in memory."""

from collections.abc import Iterable

import torch
from torch import nn

from models import loss_of
from spillway.optim.update import join_master, split_master

# Larger than the rounding noise of gradients that are zero in exact arithmetic (biases before a softmax): at 1e-8 AdamW
# would turn that noise into steps of full size, in plain PyTorch as in ours.
EPS = 1e-6


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]


def train(
    model: nn.Module,
    batches: Iterable[list[dict[str, torch.Tensor]]],
    lr: float,
    max_grad_norm: float | None,
) -> list[float]:
    """One loss per backward. Each item of `batches` is what one optimizer step accumulates."""
    optimizer = torch.optim.AdamW(groups(model, 0.01), lr=lr, eps=EPS, fused=True)
    losses = []
    for parts in batches:
        for part in parts:
            loss = loss_of(model(**part))
            (loss / len(parts)).backward()
            losses.append(loss.item())
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_fp16(
    model: nn.Module, batches: Iterable[dict[str, torch.Tensor]], lr: float, factors: Iterable[float]
) -> tuple[list[float], list[bool]]:
    """A float16 model with fp32 masters under torch.amp.GradScaler's rules, its loss times a factor per step. The
    losses, and which steps were made."""
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    decayed = [master for master in masters if master.dim() > 1]
    plain = [master for master in masters if master.dim() <= 1]
    settings = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(settings, lr=lr, eps=EPS, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    losses, made = [], []
    for batch, factor in zip(batches, factors, strict=True):
        loss = loss_of(model(**batch))
        scaler.scale(loss * factor).backward()
        losses.append(loss.item())
        for param, master in zip(params, masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        made.append(scaler.get_scale() >= before)
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master)
    return losses, made


def train_bf16(model: nn.Module, batches: Iterable[list[dict[str, torch.Tensor]]], lr: float) -> list[float]:
    """A bfloat16 model with fp32 masters: gradients in bfloat16, AdamW on the masters, weights rounded from them."""
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    decayed = [master for master in masters if master.dim() > 1]
    plain = [master for master in masters if master.dim() <= 1]
    settings = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(settings, lr=lr, eps=EPS, fused=True)
    losses = []
    for parts in batches:
        for part in parts:
            loss = loss_of(model(**part))
            (loss / len(parts)).backward()
            losses.append(loss.item())
        for param, master in zip(params, masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            weight, low = split_master(master.detach())
            assert torch.equal(join_master(weight, low), master)
            param.data.copy_(weight)
    return losses
