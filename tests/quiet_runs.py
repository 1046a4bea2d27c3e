"""Runs of tests, which say nothing, and what they left."""

import contextlib
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from rich.console import Console

from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.trainer.checkpoints.folder_io import CheckpointWeights, FolderCheckpointIO
from birthmark.trainer.run import pretrain


def config_file(path, config):
    path.write_text(yaml.safe_dump(asdict(config)))
    return path


def run(config, path, **more):
    return pretrain(config, RunDir(path), console=Console(quiet=True), **more).run


def logged(run, key):
    return {r["step"]: r[key] for r in read_metrics(run.metrics) if key in r}


def weights(run, step):
    return FolderCheckpointIO().load_checkpoint(run.checkpoint(step))["state_dict"]


def same_weights(a, b, step):
    """Say if two runs have the same weights and buffers at a step, to the bit."""
    ours, theirs = weights(a, step), weights(b, step)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def up_to(step, run, path):
    """A copy of a run as it was after ``step`` steps; its log is whole."""
    shutil.copytree(run.path, path)
    for folder in path.glob("[cs]*s/step-*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    return RunDir(path)


def leaves(tree, path=()):
    """Everything in a tree of dictionaries and lists by its path, in its order."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else None
    if pairs is None:
        return {path: tree}
    return {place: leaf for key, inner in pairs for place, leaf in leaves(inner, (*path, key)).items()}


def adamw(model):
    """AdamW of the tiny run, by hand: matrices decay, vectors do not."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def averages(run, step):
    """The averaged weights of a checkpoint, one behind another."""
    found = CheckpointWeights(run.checkpoint(step), average=True)
    return torch.cat([found[name].flatten() for name in sorted(found)]).numpy()


def ranks_of(marker):
    """Processes with this word or variable, by their rank: forked ones are nobody's children."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, variables = ((place / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            if str(marker).encode() in words + variables:
                found |= {int(v.partition(b"=")[2]): int(place.name) for v in variables if v.startswith(b"RANK=")}
    return found
