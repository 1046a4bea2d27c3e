"""What users' runs come to, byte for byte, beside what they came to before: numbers must survive a change of structure.

By hand, for minutes: ``pytest -m slow tests/test_digests.py``. ``python tests/test_digests.py`` writes
``tests/digests.json`` anew, for a change that is meant to change numbers. Sums depend on the processor and on torch, so
digests of other machines are not compared.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("digests.json")

#: Runs, from the shortest path to a user's numbers: command lines of ``birthmark``, in one folder, in this order.
COMMANDS = (
    f"pretrain --config {ROOT}/configs/demo.yaml --run_dir runs/demo --snapshot.probes [random]",
    f"pretrain --config {ROOT}/configs/sinks.yaml --run_dir runs/sinks",
    f"pretrain --config {ROOT}/configs/sinks_headnorm.yaml --run_dir runs/sinks_headnorm",
    "report runs/sinks runs/sinks_headnorm --out both.html",
    f"ablate {ROOT}/configs/studies/sinks.yaml --out studies/sinks --arms plain,headnorm,exact_amplify,sigmoid"
    " --set trainer.max_steps=60 trainer.checkpoint_every=30",
    f"ablate {ROOT}/configs/studies/seedprint.yaml --out studies/seedprint --set trainer.max_steps=20"
    " trainer.checkpoint_every=10 snapshot.probes=[random]",
)
#: Names of metrics.jsonl that say how fast the machine was.
SPEED = {"train/tokens_per_s", "train/flops_per_s", "train/mfu", "train/data_wait", "train/peak_memory"}
#: Names that came after the digests were recorded.
NEWER = {
    *("train/skipped_steps", "train/loss_spikes", "train/grad_norm_spikes"),
    *("seedprint/weights", "seedprint/weights_stranger"),
}


#: What depends on the installed packages, by the beginning of its name, and where the record says which they were.
CONTINUED = ("studies/seedprint/readmes", "studies/seedprint/table", "installed texts")
READMES = "installed texts"


def continued_on(folder):
    """Content hash of the text that the lineage study continues on."""
    return json.loads((folder / "studies/seedprint/readmes/seed-42/birth.json").read_text())["data"]["content_hash"]


def machine():
    """What sums depend on."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    fields = dict(line.split(":", 1) for line in cpu.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    name = fields.get("model name", platform.processor())
    return (
        f"{name} family {fields.get('cpu family')} model {fields.get('model')}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}"
    )


def _without_seconds(value):
    if isinstance(value, dict):
        return {
            key: _without_seconds(item)
            for key, item in value.items()
            if key not in ("seconds", "created", "sha256", "arrays_sha256")
        }
    return value


def _content(file):
    """What must not change: all of it, but for times."""
    if file.name == "metrics.jsonl":
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [{key: value for key, value in line.items() if key not in SPEED | NEWER} for line in lines]
        lines = [{key: value for key, value in line.items() if not re.match("train/.*_s$", key)} for line in lines]
        # A line of times alone came after the digests were recorded.
        lines = [line for line in lines if line.keys() > {"step"}]
        return "\n".join(json.dumps(line, sort_keys=True) for line in lines).encode()
    if file.name == "summary.json":
        return json.dumps(_without_seconds(json.loads(file.read_text())), sort_keys=True).encode()
    if file.name == "birth.json":
        return json.loads(file.read_text())["digest"].encode()
    return file.read_bytes()


def digests(folder):
    """SHA-256 of births, losses, snapshots and tables: of a folder of snapshots or of pictures' numbers as one."""
    kept = ("birth.json", "metrics.jsonl", "summary.json", "arrays.safetensors", "table.md")
    files = [f for f in folder.rglob("*") if f.name in kept or (f.suffix == ".csv" and f.name != "metrics.csv")]
    found = defaultdict(hashlib.sha256)
    for file in sorted(f for f in files if "wandb" not in f.parts):
        path = file.relative_to(folder)
        parts = [i for i, part in enumerate(path.parts) if part.endswith("-data") or part == "snapshots"]
        whole = Path(*path.parts[: parts[0] + 1]) if parts else path
        found[whole.as_posix()].update(path.as_posix().encode() + b"\0" + _content(file))
    return {name: digest.hexdigest() for name, digest in found.items()}


def measured(folder):
    """Run everything in a folder."""
    for command in COMMANDS:
        words = [*command.split(), *(["--log.wandb", "off"] if command.startswith("pretrain") else [])]
        subprocess.run([sys.executable, "-m", "birthmark.launch.cli", *words], cwd=folder, check=True)
    return digests(folder)


@pytest.mark.slow
def test_births_losses_snapshots_and_tables_are_those_of_before(tmp_path):
    recorded = json.loads(RECORD.read_text())
    if machine() not in recorded:
        pytest.skip(f"digests were recorded on {', '.join(recorded)}; this is {machine()}")
    before, now = recorded[machine()], measured(tmp_path)
    # Continued runs read the texts of installed packages: with other packages they, and their tables, are other ones.
    if continued_on(tmp_path) != before[READMES]:
        before = {name: digest for name, digest in before.items() if not name.startswith(CONTINUED)}
    now[READMES] = continued_on(tmp_path)
    assert {name: now.get(name) for name in before} == before
    assert now.keys() >= before.keys()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    known = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    found = measured(folder)
    RECORD.write_text(json.dumps(known | {machine(): found | {READMES: continued_on(folder)}}, indent=1) + "\n")
