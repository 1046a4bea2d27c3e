"""Where the runs of a study go: to this machine, to SLURM as an array, or to the agents of a W&B sweep."""
