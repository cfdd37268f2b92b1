"""`spillway train`: plan, model and data to steps."""
