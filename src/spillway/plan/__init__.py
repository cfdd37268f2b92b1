"""From a machine, a model and a budget to a plan: placement, operations, proof and prediction. No torch."""
