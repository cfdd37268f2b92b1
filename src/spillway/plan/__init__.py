"""From a machine, a model and a budget to a plan: placement, the operations of a step, proof and prediction. No torch."""
