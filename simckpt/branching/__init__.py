"""Branches of runs: hyperparameters of a branch, lineage, fan-out over machines, population-based training."""
