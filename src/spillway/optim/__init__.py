"""AdamW, Lion and SGD over the store: its settings, its arithmetic, and the torch.optim.Optimizer the user holds."""
