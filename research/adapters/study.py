"""Effects of adaptation on the sink and the mark of birth: LoRA, prefix tuning, and Prefix-Tuning+ at equal parameters.

    python research/adapters/study.py --folder FOLDER [--seeds 0,1,2] [--figure PNG]

Each base is trained first, then adapted to data that it has not seen by every kind, and as a control by training all of
its weights for as long. Start it in the repository, whose ``docs`` and ``models`` are the text. Figures of a base and a
seed stay in FOLDER: after an interrupt what is there is not done again. Out of all that is there it writes
``results.json`` and ``results.md`` beside it, and with ``--figure`` a picture.
"""

from __future__ import annotations

import argparse
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

import birthmark as bm
from birthmark.data.config import DataConfig
from birthmark.data.prepare import PreparedData, prepare
from birthmark.data.probes import random_probe
from birthmark.measure.measurement import BirthReference, birth_reference, measure
from birthmark.models.adapter_config import AdapterConfig
from birthmark.models.adapters import attach, initialize_adapter
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, InitConfig, ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.trainer.config import OptimConfig
from birthmark.trainer.module import next_token_loss, next_token_losses
from birthmark.trainer.optimizers.parameter_groups import parameter_groups

RESULTS = Path(__file__).with_name("results")

BATCH = 32
_BACKCOPY = ModelConfig(
    d_model=32,
    n_layers=1,
    n_heads=1,
    vocab_size=32,
    max_seq_len=32,
    positions="learned",
    init=InitConfig(kind="normal"),
)
_HEADNORM = replace(_BACKCOPY, attention=AttentionConfig(aggregation="headnorm"))
_TEXT = ModelConfig(d_model=64, n_layers=2, n_heads=4, vocab_size=512, max_seq_len=32)


class Base(NamedTuple):
    """A base model with its data and the data of its adaptation."""

    model: ModelConfig
    steps: int
    data: DataConfig
    """Data of the base."""
    new: DataConfig
    """Data of its adaptation."""
    more: int
    """Steps of that."""


_TASK, _OTHER_TASK = DataConfig(path="backcopy"), DataConfig(path="backcopy", data_seed=1)
BASES = {
    "backcopy": Base(_BACKCOPY, 500, _TASK, _OTHER_TASK, 150),
    "backcopy-headnorm": Base(_HEADNORM, 500, _TASK, _OTHER_TASK, 150),
    "text": Base(_TEXT, 300, DataConfig(path="docs"), DataConfig(path="models"), 100),
}
#: Adapters begin at nothing, and get a higher rate than weights.
LR, ADAPTER_LR = 3e-3, 1e-2


def arms(base: str) -> dict[str, AdapterConfig]:
    """Return the adapter of each kind, all with d·K parameters per block (K the width of a head); and, as the control,
    all weights.
    """
    d_head = BASES[base].model.d_head
    return {
        "lora": AdapterConfig("lora", rank=d_head // 4),
        "prefix": AdapterConfig("prefix", length=d_head // 2),
        "prefix_plus": AdapterConfig("prefix_plus"),
        "all weights": AdapterConfig(),
    }


def train(model: Decoder, data: PreparedData, steps: int, lr: float) -> None:
    """Train with AdamW at a constant rate after 20 steps of warm-up, with the parameter groups and clip norm of
    a run.
    """
    optim = OptimConfig(weight_decay=0.0)
    optimizer = optim.optimizer.build(parameter_groups(model, optim.optimizer), lr)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20)
        batch = torch.from_numpy(data.train.batch(step * BATCH, BATCH))
        optimizer.zero_grad()
        next_token_loss(model, batch).objective.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()


@torch.no_grad()
def losses(model: Decoder, data: PreparedData) -> dict[str, float]:
    """Return the validation loss, and the loss at trigger positions if the task has them."""
    batch = data.val.batch(0, 128)
    found = next_token_losses(model.eval(), torch.from_numpy(batch)).numpy()
    groups = {name: mask(torch.from_numpy(batch[:, :-1])).numpy() for name, mask in data.groups.items()}
    return {"loss": float(found.mean())} | {
        name: float(found[np.asarray(where)].mean()) for name, where in groups.items()
    }


def looked_at(model: Decoder, birth: Decoder, data: PreparedData, reference: BirthReference) -> dict[str, Any]:
    """Measure losses, sink and mark of a model beside its birth."""
    length, config = model.config.max_seq_len, model.config
    random = measure(model, random_probe(config.vocab_size, 64, length, 0), reference).scalars
    text = measure(model, data.text_probe(64, length)).scalars
    return {
        **losses(model, data),
        "sink": text["sink_mass"],
        "uniform": text["sink_uniform"],
        "prefix_mass": text.get("prefix_mass"),
        "alignment": random["alignment"],
        "rank_persistence": random["rank_persistence"],
        "z": bm.fingerprint(model, birth, n_inputs=300, seq_len=length).z,
    }


def rows_of(base: str, seed: int) -> list[dict[str, Any]]:
    """Measure a base before and after each of its adaptations."""
    config, steps, data, new, more = BASES[base]

    def prepared(config_of_data: DataConfig) -> PreparedData:
        return prepare(config_of_data, vocab_size=config.vocab_size, seq_len=config.max_seq_len)

    first = prepared(data)
    second = prepared(new if first.tokenizer_path is None else replace(new, tokenizer=str(first.tokenizer_path)))
    birth, trained = born(config, seed).eval(), born(config, seed)
    reference = birth_reference(birth, random_probe(config.vocab_size, 64, config.max_seq_len, 0), 64)
    train(trained, first, steps, LR)
    rows = [{"base": base, "arm": "before", "seed": seed} | looked_at(trained, birth, second, reference)]
    for arm, adapter in arms(base).items():
        model = deepcopy(trained)
        model.zero_grad()
        attach(model, adapter)
        initialize_adapter(model, config.init, seed)
        train(model, second, more, ADAPTER_LR if adapter.is_on else LR)
        n = sum(p.numel() for p in model.parameters() if p.requires_grad)
        rows.append({"base": base, "arm": arm, "seed": seed, "trained": n} | looked_at(model, birth, second, reference))
    return rows


_SHOWN = {
    "loss": "loss",
    "trigger": "on triggers",
    "sink": "sink mass",
    "prefix_mass": "mass on prefix",
    "alignment": "alignment",
    "rank_persistence": "rank persistence",
    "z": "z with birth",
}


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval by Student's t."""
    x = np.array(values, dtype=float)
    half = 0.0 if len(x) < 2 else float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5)
    return float(x.mean()), half


def cell(values: list[float | None]) -> str:
    """Format the mean ± half of its interval."""
    found = [value for value in values if value is not None]
    if not found:
        return "–"
    mean, half = interval(found)
    digits = 1 if abs(mean) >= 10 else 2
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Format a line for each base before adaptation, and one for each of its arms."""
    lines = ["| base | arm | trained | " + " | ".join(_SHOWN.values()) + " |", "|---" * (len(_SHOWN) + 3) + "|"]
    for base in BASES:
        for arm in ("before", *arms(base)):
            found = [row for row in rows if (row["base"], row["arm"]) == (base, arm)]
            if found:
                n = f"{found[0]['trained']:,}" if "trained" in found[0] else "–"
                cells = [cell([row.get(name) for row in found]) for name in _SHOWN]
                lines.append(f"| {base} | {arm} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw loss, sink mass and mark of every base and arm; each seed is a point."""
    from birthmark.report.pictures.saving import save_png
    from birthmark.report.pictures.style import REFERENCE, figure_style, new_figure, run_colour

    shown = {"loss": "loss", "sink": "sink mass", "rank_persistence": "rank persistence", "z": "z with birth"}
    titles = {"backcopy": "with a sink", "backcopy-headnorm": "without one", "text": "text"}
    bases = [base for base in BASES if any(row["base"] == base for row in rows)]
    names = {"before": "before", "lora": "LoRA", "prefix": "prefix", "prefix_plus": "prefix+", "all weights": "all"}
    with figure_style():
        figure, axes = new_figure(760, 150 * len(bases), rows=len(bases), columns=len(shown), squeeze=False)
        for base, of_base in zip(bases, axes, strict=True):
            for (name, label), axis in zip(shown.items(), of_base, strict=True):
                for number, arm in enumerate(names):
                    values = [row[name] for row in rows if (row["base"], row["arm"]) == (base, arm)]
                    axis.plot([number] * len(values), values, "o", color=run_colour(number), markersize=4)
                if name == "sink":
                    axis.axhline(next(row["uniform"] for row in rows if row["base"] == base), **REFERENCE)
                    axis.set_ylim(0, None)
                axis.set_xticks(range(len(names)), labels=list(names.values()))
                axis.set_xlim(-0.5, len(names) - 0.5)
                axis.set_title(f"{titles[base]}: {label}")
        save_png(figure, out)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--bases", default=",".join(BASES), help="none: write what is there")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for base in filter(None, args.bases.split(",")):
        for seed in map(int, args.seeds.split(",")):
            file = args.folder / f"{base}-{seed}.json"
            if not file.is_file():
                file.write_text(json.dumps(rows_of(base, seed)) + "\n")
                print(file, flush=True)
    rows = [row for file in sorted(args.folder.glob("*.json")) for row in json.loads(file.read_text())]
    RESULTS.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(rows))
    if args.figure is not None:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
