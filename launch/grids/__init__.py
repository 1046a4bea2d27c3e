"""Launchers of the runs of a study: this machine, SLURM as an array, or the agents of a W&B sweep."""
