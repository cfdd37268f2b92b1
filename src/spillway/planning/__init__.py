"""`spillway plan`: will it fit, how fast, why, and what would help; without loading a weight."""
