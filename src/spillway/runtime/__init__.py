"""Executes the operations of a plan: lanes, the window, the unit function, gradients, the recorder."""
