"""Weights in and out as Hugging Face safetensors, and saved points of a run."""
