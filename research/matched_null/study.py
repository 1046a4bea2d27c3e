"""Errors of the null ``matched`` about strangers, and its power for kin, after changes of the channels.

    python research/matched_null/study.py births|trained|cost [--change none|…|rotation] [--births 30] …

``births``: all pairs of newborn strangers of each architecture, ours and those of ``transformers``; one of each pair as
it is, after a permutation, flips of sign, negation and factors of its channels together, or after a rotation.
``trained``: models of several seeds trained on the same text (bytes of Python's standard library): every pair of them,
and every birth against what it became, under ``dimensions`` and ``matched``, after each change.
``cost``: time and peak memory of one comparison of weights at D 4096.
Each line replaces its previous version in ``results.json`` beside it; the tables of ``results.md``
follow from them.
"""

from __future__ import annotations

import argparse
import json
import resource
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birthmark.measure.hf import HFModel
from birthmark.measure.hidden_states import FingerprintProbe, hidden_states
from birthmark.measure.next_tokens import share_interval
from birthmark.measure.stream_weights import MOST_HEADS, MOST_TOKENS, MOST_UNITS, stream_weights
from birthmark.metrics.matched_weights import StreamWeights, compare_weights
from birthmark.metrics.seedprint import Fingerprint, HiddenStates, compare
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.research.changes.change import Change, ModelWeights, decoder_of, weights_of
from birthmark.research.changes.coordinates import (
    ChannelPermutation,
    ChannelScaling,
    Rotation,
    SignFlips,
    UnitPermutation,
)

RESULTS = Path(__file__).with_name("results.json")
SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 256, "max_seq_len": 32, "d_ff": 64}

TOGETHER = "permutation, signs, negation, scale"

#: Architectures of our own: fields of ModelConfig.
OURS: dict[str, dict[str, Any]] = {
    "gelu": {"mlp": "gelu"},
    "relu, tied": {"mlp": "relu", "tie_embeddings": True},
    "swiglu": {"mlp": "swiglu"},
    "swiglu, D 48": {"mlp": "swiglu", "d_model": 48},
    "swiglu, D 64, one block": {"mlp": "swiglu", "d_model": 64, "n_layers": 1},
    "layernorm, learned positions": {"norm": "layernorm", "mlp": "gelu", "positions": "learned"},
}
#: Architectures of transformers: model type, fields of its config.
THEIRS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma": {"head_dim": 16},
    "qwen2": {},
    "phi3": {"pad_token_id": 0},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 2},
}


def theirs(name: str, seed: int) -> HFModel:
    """Build a model of transformers as that library initialises it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    fields = shape | {"intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 64} | THEIRS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HFModel(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)).eval())


def _mapped(given: StreamWeights, change: Callable[[np.ndarray], np.ndarray]) -> StreamWeights:
    return StreamWeights(
        {name: change(x).astype(np.float32) for name, x in given.tables.items()},
        {name: change(x).astype(np.float32) for name, x in given.units.items()},
    )


def mappings(width: int, seed: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return the effect of each change of the channels on a vector of the residual stream."""
    rng = np.random.default_rng(seed)
    order, signs = rng.permutation(width), rng.choice([-1, 1], width)
    factors, turn = np.exp(rng.standard_normal(width)), np.linalg.qr(rng.standard_normal((width, width)))[0]
    return {"none": lambda x: x, TOGETHER: lambda x: -(x * factors * signs)[..., order], "rotation": lambda x: x @ turn}


#: Changes of a trained model, one after the other.
CHANGES: dict[str, tuple[Change, ...]] = {
    "none": (),
    "channels in another order": (ChannelPermutation(),),
    "signs of half of the channels": (SignFlips(),),
    "negation": (SignFlips(share=1),),
    "factors between gains and maps": (ChannelScaling(),),
    "rotation": (Rotation(),),
    "hidden units in another order": (UnitPermutation(),),
    "channels and hidden units": (ChannelPermutation(), UnitPermutation()),
}
#: A further change beyond those of the table: the channels of values in another order too.
ALL_ORDERS = "channels, hidden units and values"


def changed(model: Decoder, change: str, seed: int) -> Decoder:
    """Return a copy of the model after a change."""
    weights: ModelWeights = weights_of(model)
    for step in CHANGES[change]:
        weights = step(weights, seed)
    return decoder_of(weights)


def in_all_orders(given: StreamWeights, seed: int) -> StreamWeights:
    """Permute the units of every block."""
    rng = np.random.default_rng(seed)
    return StreamWeights(given.tables, {name: x[rng.permutation(len(x))] for name, x in given.units.items()})


def rate(found: Iterable[Fingerprint]) -> dict[str, Any]:
    """Count those called kin, with the 95 % interval, in per cent."""
    tests = list(found)
    n_kin = sum(test.verdict == "kin" for test in tests)
    low, high = share_interval(n_kin, len(tests))
    z = [test.z for test in tests]
    return {
        "n": len(tests), "kin": n_kin, "per_cent": 100 * n_kin / len(tests), "low": 100 * low,
        "high": 100 * high, "z_median": float(np.median(z)), "z_min": min(z), "z_max": max(z),
    }  # fmt: skip


def births(n: int, change: str) -> Iterator[dict[str, Any]]:
    """Test all pairs of n newborn strangers of each architecture, with one of each pair changed."""
    for place, name in enumerate([*OURS, *THEIRS]):
        kept: list[tuple[StreamWeights, StreamWeights]] = []
        # Births of one seed have weights in common, whatever their architecture.
        for seed in range(1000 * place, 1000 * place + n):
            newborn = born(ModelConfig(**(SMALL | OURS[name])), seed, "cpu") if name in OURS else theirs(name, seed)
            own = stream_weights(newborn)
            kept.append((own, _mapped(own, mappings(newborn.config.d_model, seed)[change])))
        tests = [compare_weights(kept[i][0], kept[j][1]) for j in range(n) for i in range(j)]
        yield {"part": "births", "family": name, "change": change, **rate(tests)}


def text() -> np.ndarray:
    """Return the bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files)[: 4 << 20], dtype=np.uint8).astype(np.int64)


def train(model: Decoder, data: np.ndarray, steps: int) -> Decoder:
    """Train on the same batches as every other model: AdamW, lr 3e-3 falling to 0, weight decay .1."""
    rng, length = np.random.default_rng(0), model.config.max_seq_len
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        starts = rng.integers(0, len(data) - length - 1, 16)
        batch = torch.from_numpy(np.stack([data[s : s + length + 1] for s in starts]))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item(), flush=True)
    return model


def trained(n: int, steps: int) -> Iterator[dict[str, Any]]:
    """Test strangers that learnt from the same text, and births against their trained models."""
    data, probe = text(), FingerprintProbe(n_inputs=500, seq_len=16)
    fields: dict[str, Any] = SMALL | {"mlp": "swiglu", "max_seq_len": 16}
    newborn = [born(ModelConfig(**fields), seed, "cpu") for seed in range(n)]
    became = [train(born(model.config, seed, "cpu"), data, steps) for seed, model in enumerate(newborn)]
    weights, hidden = [], []
    for seed, model in enumerate(became):
        models = {change: changed(model, change, seed) for change in CHANGES}
        weights.append({change: stream_weights(m) for change, m in models.items()})
        weights[-1][ALL_ORDERS] = in_all_orders(weights[-1]["channels in another order"], seed)
        hidden.append({change: HiddenStates(hidden_states(m, probe)) for change, m in models.items()})
        hidden[-1][ALL_ORDERS] = hidden[-1]["channels in another order"]  # logits stay, and so do these
    of_births = [(stream_weights(m), HiddenStates(hidden_states(m, probe))) for m in newborn]
    for change in weights[0]:
        found = {
            ("matched", "strangers"): [
                compare_weights(weights[i]["none"], weights[j][change]) for j in range(n) for i in range(j)
            ],
            ("dimensions", "strangers"): [
                compare(hidden[i]["none"], hidden[j][change]) for j in range(n) for i in range(j)
            ],
            ("matched", "kin"): [compare_weights(own, weights[i][change]) for i, (own, _) in enumerate(of_births)],
            ("dimensions", "kin"): [compare(own, hidden[i][change]) for i, (_, own) in enumerate(of_births)],
        }
        for (null, pairs), tests in found.items():
            row = {"part": "trained", "null": null, "pairs": pairs, "change": change, "steps": steps}
            yield row | rate(tests)


def cost(width: int = 4096, blocks: int = 32) -> Iterator[dict[str, Any]]:
    """Time a comparison of two strangers with the weights that are read of a 7B model."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def weights() -> StreamWeights:
        places = {f"{i}.mlp": draw(MOST_UNITS, 3, width) for i in range(blocks)}
        places |= {f"{i}.attn": draw(128, 2 * MOST_HEADS, width) for i in range(blocks)}
        return StreamWeights({"embedding": draw(MOST_TOKENS, width), "head": draw(MOST_TOKENS, width)}, places)

    a, b = weights(), weights()
    held = sum(x.nbytes for x in (*a.tables.values(), *a.units.values()))
    start, cpu_start = time.perf_counter(), time.process_time()
    found = compare_weights(a, b)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = {"part": "cost", "width": width, "blocks": blocks, "tokens": MOST_TOKENS}
    yield row | {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "z": found.z, "peak_bytes": peak, "bytes_of_a_model": held, "threads": torch.get_num_threads(),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Format all parts as Markdown."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    lines = ["# The null `matched`: calibration and power", "", "Written by `research/matched_null/study.py`.", ""]
    if "births" in parts:
        lines += [*_of_births(parts["births"]), ""]
    if "trained" in parts:
        lines += [*_of_trained(parts["trained"]), ""]
    for row in parts.get("cost", []):
        peak, held, threads = row["peak_bytes"] / 1e9, row["bytes_of_a_model"] / 1e9, row["threads"]
        lines += [
            f"One comparison at D {row['width']}, {row['blocks']} blocks, {row['tokens']} tokens: "
            f"{row['seconds']:.0f} s ({row['cpu_seconds']:.0f} s of processor time, {threads} thread), peak memory "
            f"{peak:.1f} GB with the weights of both ({held:.1f} GB each).",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _of_births(rows: list[dict[str, Any]]) -> list[str]:
    changes = list(dict.fromkeys(row["change"] for row in rows))
    lines = [f"Newborn strangers called kin, per cent (95 % interval); {rows[0]['n']} pairs a cell. Nominal: 1 %.", ""]
    lines += ["| architecture | " + " | ".join(changes) + " |", "|---" * (len(changes) + 1) + "|"]
    for family in dict.fromkeys(row["family"] for row in rows):
        cells = [_rate([r for r in rows if (r["family"], r["change"]) == (family, c)]) for c in changes]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    lines.append("| all | " + " | ".join(_rate([r for r in rows if r["change"] == c]) for c in changes) + " |")
    lines.append("| pairs | " + " | ".join(_pairs(rows, c) for c in changes) + " |")
    return lines


def _of_trained(rows: list[dict[str, Any]]) -> list[str]:
    by_name = {(row["change"], row["null"], row["pairs"]): row for row in rows}
    heads = [(null, pairs) for pairs in ("kin", "strangers") for null in ("dimensions", "matched")]
    lines = [
        f"Models trained for {rows[0]['steps']} steps on one text. Kin: a birth and what it became; strangers: two "
    ]
    lines[0] += "trained models. Median z (smallest to largest), and how many of the pairs are called kin."
    lines += ["", "| change | " + " | ".join(f"{p}, `{n}`" for n, p in heads) + " |", "|---" * 5 + "|"]
    for change in dict.fromkeys(row["change"] for row in rows):
        found = [by_name.get((change, null, pairs)) for null, pairs in heads]
        cells = [
            "–" if r is None else f"{r['z_median']:.1f} ({r['z_min']:.1f} to {r['z_max']:.1f}), {r['kin']}/{r['n']}"
            for r in found
        ]
        lines.append(f"| {change} | " + " | ".join(cells) + " |")
    return lines


def _pairs(rows: list[dict[str, Any]], change: str) -> str:
    return f"{sum(r['n'] for r in rows if r['change'] == change):,}"


def _rate(rows: list[dict[str, Any]]) -> str:
    n, kin = sum(row["n"] for row in rows), sum(row["kin"] for row in rows)
    if not n:
        return "–"
    low, high = share_interval(kin, n)
    return f"{100 * kin / n:.2f} ({100 * low:.1f}–{100 * high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["births", "trained", "cost"])
    parser.add_argument("--births", type=int, default=30)
    parser.add_argument("--change", choices=list(mappings(2, 0)), default="none", help="Of births.")
    parser.add_argument("--models", type=int, default=14)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "births": lambda: births(options.births, options.change),
        "trained": lambda: trained(options.models, options.steps),
        "cost": cost,
    }
    for row in parts[options.part]():
        print(row, flush=True)
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        rows = [old for old in kept if _name(old) != _name(row)] + [row]
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        RESULTS.with_suffix(".md").write_text(table(rows))


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in ("part", "family", "change", "null", "pairs"))


if __name__ == "__main__":
    main()
