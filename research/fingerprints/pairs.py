"""Pairs of models, kin and strangers, in groups: the births of each family, and models made from them by training or by
hand.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from birthmark.data.backcopy import BackCopy
from birthmark.errors import UsageError
from birthmark.measure.hf import HFModel
from birthmark.measure.hidden_states import FingerprintProbe
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.exchange.pretrained import load_pretrained
from birthmark.research.changes.change import ModelWeights, decoder_of, weights_of
from birthmark.research.changes.table import read_change
from birthmark.trainer.by_name.hf_folder import transformers_for

from .evidence import Evidence, gather

# ---------------------------------------------------------------- the bench's models
# Small births of six families, trained on one language, then on another.
#
# A language is the bigram-backcopy task of one table (docs/definitions.md §11); another table is another text.
# Families of ``transformers`` are drawn by that library and, where our decoder expresses them, read as it reads any
# folder of theirs; OPT runs in their own code.

Model = Decoder | HFModel

VOCAB_SIZE, SEQ_LEN, BATCH, LR = 256, 32, 8, 3e-3
#: Seeds of the tables of the language that models learn first, and of the one that they go on with.
LANGUAGE, OTHER_LANGUAGE = 0, 1
_OURS: dict[str, Any] = {
    "d_model": 64, "n_layers": 4, "n_heads": 4, "vocab_size": VOCAB_SIZE, "max_seq_len": SEQ_LEN
}  # fmt: skip
_THEIRS: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": SEQ_LEN,
}  # fmt: skip
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": SEQ_LEN, "vocab_size": VOCAB_SIZE}
_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _ours(config: ModelConfig) -> Callable[[int], Model]:
    return lambda seed: born(config, seed)


def _theirs(config_class: str, fields: Mapping[str, Any], *, read: bool = True) -> Callable[[int], Model]:
    def birth(seed: int) -> Model:
        library = transformers_for(config_class)
        with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(seed)
            model = library.AutoModelForCausalLM.from_config(getattr(library, config_class)(**fields))
            if not read:
                return HFModel(model.float())
            model.save_pretrained(folder)
            return load_pretrained(Path(folder))

    return birth


#: Family → a birth from a seed.
FAMILIES: Mapping[str, Callable[[int], Model]] = {
    "ours, swiglu": _ours(ModelConfig(**_OURS, mlp="swiglu")),
    "ours, gelu": _ours(ModelConfig(**_OURS, mlp="gelu", norm="layernorm", positions="learned", bias=True)),
    "llama": _theirs("LlamaConfig", _THEIRS | {"intermediate_size": 176}),
    "qwen2": _theirs(
        "Qwen2Config",
        _THEIRS | {"intermediate_size": 176, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "gpt2": _theirs("GPT2Config", _GPT2 | _QUIET),
    "opt": _theirs(
        "OPTConfig", _THEIRS | {"ffn_dim": 256, "word_embed_proj_dim": 64, "dropout": 0.0}, read=False
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """Size of the bench."""

    steps: int
    """Steps of the first training."""
    more_steps: int
    """Steps of the second training, on the other language."""
    n_trained: int
    """Seeds of a family that are trained."""
    n_births: int
    """Pairs of newborn strangers of a family, each of two births of their own."""
    n_inputs: int
    """Sequences of the probe."""


FULL = Scale(steps=120, more_steps=60, n_trained=3, n_births=8, n_inputs=300)
TINY = Scale(steps=2, more_steps=1, n_trained=2, n_births=2, n_inputs=40)


def seed_of(family: str, i: int) -> int:
    """Return the ``i``-th seed of a family: no two families share a seed, since births of one seed are alike in
    part.
    """
    return 10_000 * list(FAMILIES).index(family) + i


def train(model: Model, language: int, first_step: int, steps: int) -> float:
    """Train in place: AdamW, constant rate, gradients clipped at 1; return the mean loss of the last tenth of the
    steps, in nats.
    """
    text = BackCopy(VOCAB_SIZE, SEQ_LEN - 1, language)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    model.train()
    for step in range(first_step, first_step + steps):
        batch_BT = torch.from_numpy(text.batch(BATCH * step, BATCH))
        logits_BTV = model(batch_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), batch_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    last = losses[-max(len(losses) // 10, 1) :]
    return sum(last) / len(last)


# ---------------------------------------------------------------- reordered
# Permutation of units that leaves no trace in the function: hidden units of the MLPs, and channels of values, in the
# same order in all heads.
#
# The model computes the same function. Legend: F hidden units, H heads, K width of a head, D width of the residual
# stream.


def reordered(model: ModelWeights, seed: int) -> ModelWeights:
    """Return the same model with hidden units and channels of values in random orders; attention must be plain."""
    config, rng = model.config, np.random.default_rng(seed)
    tensors = dict(model.tensors)
    for i in range(config.n_layers):
        order_F, order_K = (torch.from_numpy(rng.permutation(n)) for n in (config.ff, config.d_head))
        at = f"blocks.{i}."
        for name in ("mlp.gate.weight", "mlp.gate.bias", "mlp.up.weight", "mlp.up.bias"):
            _replace(tensors, at + name, order_F, 0)
        _replace(tensors, f"{at}mlp.down.weight", order_F, 1)
        for name in ("attn.v.weight", "attn.v.bias"):
            _replace(tensors, at + name, _of_heads(order_K, config.kv_heads), 0)
        _replace(tensors, f"{at}attn.o.weight", _of_heads(order_K, config.n_heads), 1)
    return model._replace(tensors=tensors)


def _of_heads(order_K: Tensor, n_heads: int) -> Tensor:
    return (torch.arange(n_heads)[:, None] * len(order_K) + order_K).flatten()


def _replace(tensors: dict[str, Tensor], name: str, order: Tensor, axis: int) -> None:
    if name in tensors:
        tensors[name] = tensors[name].index_select(axis, order)


# ---------------------------------------------------------------- pairs of models, kin and strangers, in groups
# The births of each family, and models made from them by training or by hand.

#: Tokens of a sequence of the probe.
PROBE_LEN = 16


#: Changes that people make to a trained model: rows of the table of `birthmark.research.changes`, with their settings,
#: in order.
CHANGES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "int8": [{"kind": "round", "to": "int8"}],
    "int4": [{"kind": "round", "to": "int4"}],
    "pruned 50 %": [{"kind": "prune", "share": 0.5}],
    "noise 10 %": [{"kind": "noise", "share": 0.1}],
    "merged 50 %": [{"kind": "merge", "share": 0.5}],
    "block dropped": [{"kind": "drop_blocks", "blocks": [1]}],
    "units permuted": [{"kind": "permute_units"}],
    "channels permuted": [{"kind": "permute_channels"}],
    "both permuted": [{"kind": "permute_channels"}, {"kind": "permute_units"}],
    "all permuted": [{"kind": "permute_channels"}],
    "signs flipped": [{"kind": "flip_signs"}],
    "channels scaled": [{"kind": "scale_channels"}],
    "rotated": [{"kind": "rotate"}],
}
#: Changes that also permute the hidden units and the channels of values.
VALUES_TOO = ("all permuted",)
MERGED = tuple(name for name, changes in CHANGES.items() if any(fields["kind"] == "merge" for fields in changes))
KIN_GROUPS = ("trained", "continued", *CHANGES)
STRANGER_GROUPS = ("births", "trained alike", "other language", "changed", "other families")
Relation = Literal["kin", "strangers"]


@dataclass(frozen=True)
class Pair:
    """Two models with the true answer."""

    relation: Relation
    group: str
    """Name of its group, in `KIN_GROUPS` or `STRANGER_GROUPS`."""
    family: str
    a: Evidence
    b: Evidence


@dataclass(frozen=True)
class Life:
    """The descendants of one birth."""

    birth: Evidence
    trained: Evidence
    continued: Evidence
    model: Model
    """Model after the first training."""
    loss: float
    """Loss at the end of the first training, in nats."""


def lead(family: str, i: int, scale: Scale, probe: FingerprintProbe) -> Life:
    """Draw a birth, train it, and continue the training on the other language."""
    model, name = FAMILIES[family](seed_of(family, i)), f"{family} {i}"
    birth = gather(f"{name} at birth", model, probe)
    loss = train(model, LANGUAGE, 0, scale.steps)
    trained, kept = gather(f"{name} trained", model, probe), copy.deepcopy(model)
    train(model, OTHER_LANGUAGE, scale.steps, scale.more_steps)
    return Life(birth, trained, gather(f"{name} continued", model, probe), kept, loss)


def changed(life: Life, kind: str, other: Life, seed: int, probe: FingerprintProbe) -> Evidence | None:
    """Return a trained model after one of `CHANGES`; None if its architecture does not allow the change.

    Args:
        life: the life whose model is changed.
        kind: the change.
        other: the life whose model is merged in, if the change is a merge.
        seed: seed of the change.
        probe: inputs.
    """
    if not isinstance(life.model, Decoder) or not isinstance(other.model, Decoder):
        return None
    found, merged = weights_of(life.model), weights_of(other.model)
    try:
        for fields in CHANGES[kind]:
            change = read_change(_allowed(fields, life.model.config))
            found = change(found, seed, merged if change.needs_other else None)
    except UsageError:
        return None
    if kind in VALUES_TOO:
        found = reordered(found, seed)
    return gather(f"{life.trained.name}, {kind}", decoder_of(found), probe)


def _allowed(fields: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
    """Adapt a change to the architecture: under layer norm, flip the signs of all channels or of none.

    Layer norm subtracts the mean over channels, so that only all of them together can change their sign.
    """
    negated = fields["kind"] == "flip_signs" and config.norm == "layernorm"
    return {**fields, "share": 1.0} if negated else fields


def kin_of_family(family: str, scale: Scale, probe: FingerprintProbe, groups: Sequence[str]) -> Iterator[Pair]:
    """Yield the kin of some of `CHANGES` alone."""
    lives = [lead(family, i, scale, probe) for i in range(scale.n_trained)]
    for i, life in enumerate(lives):
        for kind in groups:
            found = changed(life, kind, lives[(i + 1) % len(lives)], i, probe)
            if found is not None:
                yield Pair("kin", kind, family, life.trained, found)


def of_family(family: str, scale: Scale, probe: FingerprintProbe, lives: list[Life]) -> Iterator[Pair]:
    """Yield all pairs within a family; the descendants of each birth are added to ``lives``."""
    births = iter(range(1000, 1000 + 2 * scale.n_births))
    for i in births:
        a, b = (gather(f"{family} {j}", FAMILIES[family](seed_of(family, j)), probe) for j in (i, next(births)))
        yield Pair("strangers", "births", family, a, b)
    lives += [lead(family, i, scale, probe) for i in range(scale.n_trained)]
    for life in lives:
        yield Pair("kin", "trained", family, life.birth, life.trained)
        yield Pair("kin", "continued", family, life.trained, life.continued)
    for one, other in combinations(lives, 2):
        yield Pair("strangers", "trained alike", family, one.trained, other.trained)
    for i, life in enumerate(lives):
        others = [other for other in lives if other is not life]
        for other in others:
            yield Pair("strangers", "other language", family, life.trained, other.continued)
        for kind in CHANGES:
            # The model that is merged in becomes kin of the result, so another one serves as the stranger.
            merged = lives[(i + 1) % len(lives)]
            found = changed(life, kind, merged, i, probe)
            if found is not None:
                yield Pair("kin", kind, family, life.trained, found)
                for other in others:
                    if kind not in MERGED or other is not merged:
                        yield Pair("strangers", "changed", family, other.trained, found)


def between_families(lives: Mapping[str, list[Life]]) -> Iterator[Pair]:
    """Pair trained models of different families that learned the same language."""
    for one, other in combinations(lives, 2):
        for a, b in product(lives[one], lives[other]):
            yield Pair("strangers", "other families", f"{one}; {other}", a.trained, b.trained)


def all_pairs(scale: Scale, say: Callable[[str], None], groups: Sequence[str] = ()) -> Iterator[Pair]:
    """Yield every pair of the bench; models that only one family needs are dropped after it.

    Args:
        scale: size of the bench.
        say: called with a line when a family is done.
        groups: changes to limit the bench to: only their kin are yielded.
    """
    probe = FingerprintProbe(n_inputs=scale.n_inputs, seq_len=PROBE_LEN)
    if groups:
        for family in FAMILIES:
            yield from kin_of_family(family, scale, probe, groups)
            say(family)
        return
    lives: dict[str, list[Life]] = {}
    for family in FAMILIES:
        lives[family] = []
        yield from of_family(family, scale, probe, lives[family])
        say(f"{family}: loss {', '.join(f'{life.loss:.2f}' for life in lives[family])}")
    yield from between_families(lives)
