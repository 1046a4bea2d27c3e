"""The bench's models: small births of six families, trained on one language, then on another.

A language is the bigram-backcopy task of one table (docs/definitions.md §11); another table is another text. Families
of ``transformers`` are drawn by that library and, where our decoder expresses them, read as it reads any folder of
theirs; OPT runs in their own code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from birthmark.data.backcopy import BackCopy
from birthmark.measure.foreign import ForeignModel
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.exchange.pretrained import load_pretrained
from birthmark.trainer.by_name.transformers_folder import transformers_for

Model = Decoder | ForeignModel

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
                return ForeignModel(model.float())
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
