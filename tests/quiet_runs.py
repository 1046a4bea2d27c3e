"""Runs of tests, which say nothing, and what they left."""

from rich.console import Console

from birthmark.measure.records import RunDir, read_metrics
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.run import pretrain


def run(config, path, **more):
    return pretrain(config, RunDir(path), console=Console(quiet=True), **more).run


def logged(run, key):
    return {r["step"]: r[key] for r in read_metrics(run.metrics) if key in r}


def weights(run, step):
    return FolderCheckpointIO().load_checkpoint(run.checkpoint(step))["state_dict"]
