"""Measuring a model as it is done today, against one pass of ours: the same model, the same probe, the same numbers.

    python benchmarks/usual_way.py [--lengths 512 1024 2048] [--rounds 5] [--json]

The model is a newborn ``LlamaForCausalLM`` of ``transformers`` (d 768, 12 blocks, 12 heads, f 2048, V 32000: 134M
parameters) in float32, the probe 2 sequences of T random tokens in one batch.

*As published* (:func:`as_published`): eager attention with ``output_attentions=True, output_hidden_states=True``, one
sequence after another, the attentions of all layers and sequences put together, and the formulas on what this gives, as
the released scripts have them (github.com/sail-sg/Attention-Sink: ``eval_sink_open_source.py`` for what is kept and for
importance; singular values by ``svdvals``), float32, under ``torch.no_grad``.

*At its best* (:func:`at_its_best`) is the same way with everything spared that can be: all sequences in one batch, no
copy of the attentions, logits of the last position only, singular values from the second moment, Σ a² without squares.

What kept tensors do not have comes from hooks in both, as people do it: the residual stream after attention and before
the last norm, the heads' outputs before the output projection, and of the MLP's hidden units only the two means that
are wanted. Mean cosines are from sums of unit vectors in both.

*Ours* is ``measure(ForeignModel(model), probe)``. It also takes what the usual way has no tensors for, and is not
compared: the query-key lock, and a watch for NaN and inf. The model is wrapped once, as a training does it: the check
of its attention against the model's own, on one sequence, comes with the first measurement, which is not timed.

Times: both live in processes of their own, which take turns round by round; the median of the ratios of a round counts.
Memory: the peak resident memory of each process (``ru_maxrss``) over what was resident when the model was loaded, had
been measured on 16 tokens, and what is free had been given back; the whole peaks, with libraries and weights, stand
beside it. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # a worker's peak begins with what its parent held
    from torch import Tensor

#: At T = 2048: times faster, times less memory, largest difference.
LIMITS = {"faster": 3.5, "smaller": 15.0, "difference": 1e-4}
#: Values nearer to each other than this are the same, relative.
ROUNDING = 1e-5
N_SEQUENCES, WARM_UP = 2, 16
SINK_EPSILONS = [i / 10 for i in range(1, 10)]
Numbers = dict[str, np.ndarray]


# ------------------------------------------------------------------------------------------------------------------
# The usual way


class Kept(NamedTuple):
    """What hooks keep of a pass, layer by layer."""

    after_attention: list[Tensor]
    heads: list[Tensor]
    units: list[tuple[Tensor, Tensor]]
    before_norm: list[Tensor]


@contextmanager
def hooked(model: Any) -> Iterator[Kept]:
    """Keep what the library does not give."""
    kept = Kept([], [], [], [])

    def keep_units(module: Any, args: tuple[Tensor]) -> None:
        size_BTF = args[0].abs()
        kept.units.append((size_BTF[:, 0].mean(0), size_BTF[:, 1:].mean((0, 1))))

    hooks = [model.model.norm.register_forward_pre_hook(lambda module, args: kept.before_norm.append(args[0]))]
    for block in model.model.layers:
        hooks += [
            block.post_attention_layernorm.register_forward_pre_hook(
                lambda module, args: kept.after_attention.append(args[0])
            ),
            block.self_attn.o_proj.register_forward_pre_hook(lambda module, args: kept.heads.append(args[0])),
            block.mlp.down_proj.register_forward_pre_hook(keep_units),
        ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def at_its_best(model: Any, tokens_BT: Tensor) -> Numbers:
    """Every quantity of docs/definitions.md §3–7 that kept attentions, hidden states and simple hooks give."""
    import torch

    with hooked(model) as kept, torch.no_grad():
        told = model(tokens_BT, use_cache=False, output_attentions=True, output_hidden_states=True, logits_to_keep=1)
        after_mlp = [*told.hidden_states[:-1], kept.before_norm[0]]  # the library's last one is normed
        return {
            **_preference(told.logits[:, -1]),
            **_contraction(after_mlp, kept.after_attention),
            **_sinks(told.attentions),
            **_variance(kept.heads, model.config.num_attention_heads),
            **_units(kept.units),
            **_states(after_mlp),
        }


def as_published(model: Any, tokens_BT: Tensor) -> Numbers:
    """The same quantities from the same tensors, kept and computed as the released scripts do it."""
    import torch

    attentions, logits, passes = [], [], []
    with torch.no_grad():
        for sequence_1T in tokens_BT.split(1):
            with hooked(model) as kept:
                told = model(sequence_1T, use_cache=False, output_attentions=True, output_hidden_states=True)
            attentions.append(torch.cat(told.attentions)[None])
            logits.append(told.logits[:, -1])
            passes.append(kept._replace(before_norm=[*told.hidden_states[:-1], kept.before_norm[0]]))
        a_BLHTS = torch.cat(attentions)
        del attentions, told

        def joined(name: str) -> list[Tensor]:
            """A kind of states, of all sequences, layer by layer."""
            return [torch.cat(of_layer) for of_layer in zip(*(getattr(one, name) for one in passes), strict=True)]

        after_mlp = joined("before_norm")
        units = [
            tuple(torch.stack(means).mean(0) for means in zip(*of_layer, strict=True))
            for of_layer in zip(*(one.units for one in passes), strict=True)
        ]
        return {
            **_preference(torch.cat(logits)),
            **_contraction(after_mlp, joined("after_attention")),
            **_sinks_of_all(a_BLHTS),
            **_variance(joined("heads"), model.config.num_attention_heads),
            **_units(units),
            **_states(after_mlp, _singular_values),
        }


def _stack(values: list[Any]) -> np.ndarray:
    return np.stack([value.numpy() if hasattr(value, "numpy") else np.asarray(value) for value in values])


def _preference(logits_BV: Tensor) -> Numbers:
    p_V, vocab_size = logits_BV.softmax(-1).mean(0), logits_BV.shape[-1]
    w_V = logits_BV.argmax(-1).bincount(minlength=vocab_size) / len(logits_BV)
    kl = (p_V * (p_V * vocab_size).log()).sum()
    entropy = 1 - kl / np.log(vocab_size)
    return {
        "mean_prob": p_V.numpy(),
        "argmax_share": w_V.numpy(),
        "kl_uniform": kl.numpy(),
        "entropy": entropy.numpy(),
        "preference_ratio": (vocab_size * p_V.max()).numpy(),
    }


def _mean_cosine(u_XND: Tensor) -> float:
    """Over pairs of different unit vectors, averaged over the groups."""
    n = u_XND.shape[1]
    return float(((u_XND.sum(1).square().sum(-1) - n) / (n * (n - 1))).mean())


def _contraction(after_mlp: list[Tensor], after_attention: list[Tensor]) -> Numbers:
    from torch.nn.functional import normalize

    found: dict[str, list[float]] = {}
    for name, states in (("mlp", after_mlp), ("attention", after_attention)):
        units = [normalize(h_BTD, dim=-1) for h_BTD in states]
        found[f"inter_{name}"] = [_mean_cosine(u_BTD[None, :, -1]) for u_BTD in units]
        found[f"intra_{name}"] = [_mean_cosine(u_BTD) for u_BTD in units]
    directions = [normalize(h_BTD[:, -1].mean(0), dim=-1) for h_BTD in after_mlp]
    return {name: np.array(values) for name, values in found.items()} | {"mean_direction": _stack(directions)}


def _sinks(attentions: tuple[Tensor, ...]) -> Numbers:
    import torch

    length = attentions[0].shape[-1]
    queries_T = length - torch.arange(length)
    by_layer: dict[str, list[Tensor]] = {}
    rates = []
    for a_BHTS in attentions:
        importance_BHT = a_BHTS.sum(-2) / queries_T
        n_eff_BHT = 1 / torch.linalg.vector_norm(a_BHTS, dim=-1).square()
        found = {
            "sink_mass": a_BHTS[:, :, 1:, 0].mean((0, 2)),
            "importance": importance_BHT.mean(0),
            "sink_position": importance_BHT.mean(0).argmax(-1),
            "n_eff": n_eff_BHT.mean(0),
        }
        for name, value in found.items():
            by_layer.setdefault(name, []).append(value)
        rates.append(torch.stack([100 * (importance_BHT > e).float().mean(0) for e in SINK_EPSILONS]))
    grid_ELHT = torch.stack(rates, dim=1)
    return {name: _stack(values) for name, values in by_layer.items()} | {
        "sink_rate_grid": grid_ELHT[..., 0].numpy(),
        "sink_rate_by_key": grid_ELHT.mean((1, 2)).numpy(),
    }


def _sinks_of_all(a_BLHTS: Tensor) -> Numbers:
    import torch

    length = a_BLHTS.shape[-1]
    queries_T = torch.arange(length, 0, -1)
    importance_BLHT = (a_BLHTS / queries_T).sum(-2)
    grid_ELHT = torch.stack([100 * (importance_BLHT > e).float().mean(0) for e in SINK_EPSILONS])
    return {
        "sink_mass": a_BLHTS[..., 1:, 0].mean((0, 3)).numpy(),
        "importance": importance_BLHT.mean(0).numpy(),
        "sink_position": importance_BLHT.mean(0).argmax(-1).numpy(),
        "n_eff": (1 / (a_BLHTS**2).sum(-1)).mean(0).numpy(),
        "sink_rate_grid": grid_ELHT[..., 0].numpy(),
        "sink_rate_by_key": grid_ELHT.mean((1, 2)).numpy(),
    }


def _variance(heads: list[Tensor], n_heads: int) -> Numbers:
    variance_LHT = _stack([o_BTD.unflatten(-1, (n_heads, -1)).var(0).mean(-1).T for o_BTD in heads])
    over_heads_LT = variance_LHT.mean(1)
    late_L = over_heads_LT[:, (variance_LHT.shape[-1] + 1) // 2 :].mean(-1)
    return {"positional_variance": variance_LHT, "variance_discrepancy": over_heads_LT[:, 0] / late_L}


def _units(units: list[tuple[Tensor, Tensor]]) -> Numbers:
    first_LF, others_LF = (_stack([unit[i] for unit in units]) for i in (0, 1))
    middle_L1 = np.median(first_LF, axis=-1, keepdims=True)
    spread_L1 = 1.4826 * np.median(np.abs(first_LF - middle_L1), axis=-1, keepdims=True)
    is_super_LF = ((first_LF - middle_L1) / spread_L1 >= 10) & (first_LF >= 5 * others_LF)
    return {"activation_first": first_LF, "activation_others": others_LF, "super_neurons": is_super_LF.sum(-1)}


def _singular_values(h_ND: Tensor) -> Tensor:
    import torch

    value_D = torch.linalg.svdvals(h_ND).double() / len(h_ND) ** 0.5
    return torch.nn.functional.pad(value_D, (0, h_ND.shape[1] - len(value_D)))  # fewer states than channels


def _from_second_moment(h_ND: Tensor) -> Tensor:
    import torch

    return (torch.linalg.eigvalsh((h_ND.T @ h_ND).double()).clamp_min(0) / len(h_ND)).sqrt().flip(0)


def _states(after_mlp: list[Tensor], singular_values: Callable[[Tensor], Tensor] = _from_second_moment) -> Numbers:
    import torch

    dominance, massive, positions, channels, singular, ranks = [], [], [], [], [], []
    for h_BTD in after_mlp:
        size_BTD = h_BTD.abs()
        dominance.append((size_BTD.amax(-1) / size_BTD.mean(-1)).mean(0))
        value_K, index_K = size_BTD.amax(0).flatten().topk(10)
        massive.append(value_K)
        positions.append(index_K // h_BTD.shape[-1])
        channels.append(index_K % h_BTD.shape[-1])
        value_D = singular_values(h_BTD.flatten(0, 1))
        singular.append(value_D)
        ranks.append(torch.special.entr(value_D / value_D.sum()).sum().exp())
    return {
        "dominance": _stack(dominance),
        "massive_value": _stack(massive),
        "massive_position": _stack(positions),
        "massive_channel": _stack(channels),
        "singular_values": _stack(singular),
        "effective_rank": _stack(ranks),
    }


# ------------------------------------------------------------------------------------------------------------------
# Ours


def ours(model: Any, tokens_BT: Tensor) -> Numbers:
    """The same and more, from one pass."""
    from birthmark.callbacks.measure import measure

    found = measure(_wrapped(model), tokens_BT.numpy())
    return found.arrays | {name: np.array(value) for name, value in found.scalars.items() if name not in found.arrays}


@cache
def _wrapped(model: Any) -> Any:
    from birthmark.callbacks.foreign import ForeignModel

    return ForeignModel(model)


WAYS: dict[str, tuple[str, Callable[[Any, Tensor], Numbers]]] = {
    "as published": ("eager", as_published),
    "at its best": ("eager", at_its_best),
    "ours": ("sdpa", ours),
}
"""Attention that the model is loaded with, and what measures it."""


# ------------------------------------------------------------------------------------------------------------------
# Processes


def build(attention: str) -> Any:
    """The model, in evaluation mode; the same weights in every process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=2048,
        vocab_size=32000,
        max_position_embeddings=4096,
        initializer_range=768**-0.5,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes() -> int:
    """What it has now, without what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def serve(way: str, length: int, pipe: Connection) -> None:
    """One side: loads the model, then measures as often as it is asked to and says how long it took."""
    import torch

    from birthmark.trainer.allocator import keep_freed_memory

    attention, measured = WAYS[way]
    if way == "ours":
        keep_freed_memory()  # as the command does
    model = build(attention)
    tokens = torch.randint(0, 32000, (N_SEQUENCES, length), generator=torch.Generator().manual_seed(1))
    built = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "sum": sum(p.detach().sum(dtype=torch.float64).item() for p in model.parameters()),
        "threads": torch.get_num_threads(),
    }
    pipe.send(built)
    measured(model, tokens[:, :WARM_UP])
    loaded = resident_bytes()
    numbers: Numbers = {}
    while pipe.recv():
        start = time.perf_counter()
        numbers = measured(model, tokens)
        pipe.send(time.perf_counter() - start)
    peak = peak_bytes()
    pipe.send({"numbers": numbers, "peak": peak, "above": peak - loaded})


def differences(usual: Numbers, found: Numbers) -> dict[str, dict[str, float]]:
    """Of every quantity that both have: the largest difference, and that over the largest value."""
    shared = {}
    for name, theirs in usual.items():
        ours = np.asarray(found[name], dtype=np.float64)
        if name in ("massive_position", "massive_channel"):
            # Places in a list by size: of values that are the same up to rounding, either may come first.
            value_SK = usual["massive_value"]
            apart = np.abs(np.diff(value_SK, axis=-1)) > ROUNDING * value_SK[:, 1:]
            edge = np.ones((len(value_SK), 1), dtype=bool)
            told = np.hstack([edge, apart]) & np.hstack([apart, ~edge])
            ours, theirs = np.where(told, ours, 0), np.where(told, theirs, 0)
        largest = float(np.abs(theirs).max())
        gap = float(np.abs(ours - theirs).max())
        shared[name] = {"absolute": gap, "relative": gap / largest if largest else gap}
    return shared


def compare(length: int, rounds: int) -> dict[str, Any]:
    """Both ways at one length."""
    context, pipes, processes, built = get_context("spawn"), {}, [], {}
    for way in WAYS:
        pipes[way], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(way, length, theirs)))
        processes[-1].start()
        built[way] = pipes[way].recv()
    if any(built[way] != built["ours"] for way in WAYS):
        raise SystemExit(f"the processes have different models: {built}")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 1):
        for way, pipe in pipes.items():
            pipe.send(True)
            took = pipe.recv()
            if round_:  # the first round faults its memory in
                seconds[way].append(took)
    told = {}
    for way, pipe in pipes.items():
        pipe.send(False)
        told[way] = pipe.recv()
    for process in processes:
        process.join()
    rivals = {}
    for way in WAYS:
        if way != "ours":
            ratios = [a / b for a, b in zip(seconds[way], seconds["ours"], strict=True)]
            shared = differences(told[way]["numbers"], told["ours"]["numbers"])
            rivals[way] = {
                "faster": statistics.median(ratios),
                "quartiles": [float(q) for q in np.percentile(ratios, [25, 75])],
                "smaller": told[way]["above"] / told["ours"]["above"],
                "difference": max(gap["relative"] for gap in shared.values()),
                "differences": shared,
            }
    return {
        "length": length,
        "seconds": {way: statistics.median(times) for way, times in seconds.items()},
        "above_bytes": {way: told[way]["above"] for way in WAYS},
        "peak_bytes": {way: told[way]["peak"] for way in WAYS},
        "rivals": rivals,
        **{name: built["ours"][name] for name in ("parameters", "threads")},
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("T", "way", "s", "ours is × faster", "quartiles", "MiB", "ours is × smaller")
    for heading in ("whole peak, GiB", "largest difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        for way in WAYS:
            cells = [str(row["length"]), way, f"{row['seconds'][way]:.2f}"]
            above, peak = f"{row['above_bytes'][way] / 2**20:,.0f}", f"{row['peak_bytes'][way] / 2**30:.2f}"
            if way == "ours":
                table.add_row(*cells, "", "", above, "", peak, "", end_section=True)
                continue
            rival = row["rivals"][way]
            worst = max(rival["differences"], key=lambda name: rival["differences"][name]["relative"])
            table.add_row(
                *cells,
                f"{rival['faster']:.2f}",
                "–".join(f"{q:.2f}" for q in rival["quartiles"]),
                above,
                f"{rival['smaller']:.1f}",
                peak,
                f"{rival['difference']:.0e} ({worst})",
            )
    return table


def _verdicts(row: dict[str, Any]) -> list[str]:
    published, every = row["rivals"]["as published"], row["rivals"].values()
    kept = {
        f"≥ {LIMITS['faster']:g} × faster": published["faster"] >= LIMITS["faster"],
        f"≥ {LIMITS['smaller']:g} × less memory": published["smaller"] >= LIMITS["smaller"],
        f"differences ≤ {LIMITS['difference']:g}": all(r["difference"] <= LIMITS["difference"] for r in every),
    }
    return [f"{limit}: {'kept' if good else 'MISSED'}" for limit, good in kept.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of timings per length, after one that is dropped")
    parser.add_argument("--json", action="store_true", help="print it as JSON, with the difference of every quantity")
    args = parser.parse_args()
    rows = [compare(length, args.rounds) for length in args.lengths]
    from importlib.metadata import version

    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "birthmark"))
    if args.json:
        print(json.dumps({"versions": libraries, "rows": rows}, indent=2))
        return
    console = Console(width=150)
    console.print(_table(rows))
    for row in rows:
        if row["length"] == 2048:
            console.print("At T = 2048, against what is published: " + "; ".join(_verdicts(row)), highlight=False)
    n_compared = len(rows[0]["rivals"]["as published"]["differences"])
    console.print(
        f"{rows[0]['parameters']:,} parameters, float32, {N_SEQUENCES} sequences, {n_compared} quantities compared, "
        f"{args.rounds} rounds; {rows[0]['threads']} threads, {platform.machine()}, CPython "
        f"{platform.python_version()}, {libraries}",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
