"""`spillway train`: plan, model and data to steps."""

from spillway.training.run import train

__all__ = ["train"]
