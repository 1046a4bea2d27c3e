"""Runs of tests, which say nothing, and what they left."""

import torch
from rich.console import Console

from birthmark.measure.records import RunDir, read_metrics
from birthmark.trainer.checkpoints.folder_io import CheckpointWeights, FolderCheckpointIO
from birthmark.trainer.run import pretrain


def run(config, path, **more):
    return pretrain(config, RunDir(path), console=Console(quiet=True), **more).run


def logged(run, key):
    return {r["step"]: r[key] for r in read_metrics(run.metrics) if key in r}


def weights(run, step):
    return FolderCheckpointIO().load_checkpoint(run.checkpoint(step))["state_dict"]


def averages(run, step):
    """The averaged weights of a checkpoint, one behind another."""
    found = CheckpointWeights(run.checkpoint(step), average=True)
    return torch.cat([found[name].flatten() for name in sorted(found)]).numpy()
