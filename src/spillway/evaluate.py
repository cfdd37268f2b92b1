"""The loss on data that is not trained on."""

from dataclasses import dataclass

import torch
from torch import nn

from spillway.data import Batches, DataPosition
from spillway.data.batches import IGNORED
from spillway.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Batches of held-out samples, as many rows as a micro-batch of training has: what fits there fits here."""

    batches: Batches

    def loss(self, model: nn.Module, session: Session) -> float:
        """Mean over all tokens that would be trained. Units stream through the slots of training; logits are never
        whole."""
        total, count, device = 0.0, 0, session.device.torch_device
        model.eval()
        try:
            with torch.no_grad(), session.without_logits():
                for index in range(self.batches.per_epoch()):
                    batch = self.batches.at(DataPosition(0, index))
                    trained = int((batch["labels"] != IGNORED).sum())
                    if trained:
                        there = {key: tensor.to(device) for key, tensor in batch.items()}
                        found = model(**there, use_cache=False).loss  # with one it does not look where documents begin
                        total, count = total + trained * float(found), count + trained
        finally:
            model.train()
        return total / count if count else float("nan")
