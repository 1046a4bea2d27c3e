"""Model card of an exported folder: the model, its origin, and its measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..findings.formatting import format_value, number_of, one_line
from ..measure.metrics_log import metrics_by_step
from ..measure.records import RunDir, Snapshot, step_of
from ..metrics.quantities import LOGGED
from ..models.config import ModelConfig, dotted
from ..models.exchange.gguf_header import kinds_in_words
from ..models.parameter_shapes import n_idle, parameter_shapes
from .table import Column, Table
from .verdicts import snapshot_figures

_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{more})
{tokenizer}
```
"""
_GGUF = "llama.cpp, and what is built on it, loads `{file}`; `transformers` reads GGUF files of other families alone."
_CODE = """`trust_remote_code=True` runs the files {files}, which lie beside this one: read
them first. They are the code of the decoder that trained, and need torch and `transformers` alone. Weights are
safetensors; nothing is unpickled.
"""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run about one of its models."""

    birth: Mapping[str, Any] = field(default_factory=dict)
    """``birth.json``."""
    snapshot: Snapshot | None = None
    """The newest one that is not newer than the model."""
    loss: tuple[int, float] | None = None
    """Step and value of the newest validation loss that is not newer."""


def facts_of_run(run: RunDir, step: int) -> RunFacts:
    """Collect the facts in a run's records about its model after ``step`` steps.

    Raises:
        RunError: a record is damaged; the message names the file.
    """
    before = [folder for folder in run.snapshot_folders() if step_of(folder) <= step]
    losses = {at: loss for at, loss in metrics_by_step(run).series("val/loss").items() if at <= step}
    return RunFacts(
        run.read_birth(),
        Snapshot.read(before[-1]) if before else None,
        (max(losses), losses[max(losses)]) if losses else None,
    )


def model_card(
    name: str,
    config: ModelConfig,
    step: int,
    facts: RunFacts,
    *,
    code: Sequence[str] = (),
    gguf_file: str | None = None,
    hf_reads_gguf: bool = True,
    has_tokenizer: bool = False,
    digest: str | None = None,
    certificate: Mapping[str, Any] | None = None,
    averaged: str = "",
) -> str:
    """Write the card in Markdown.

    It contains neither the seed nor a path. With a certificate it lacks the digest of the birth too: seeds could be
    tried against it.

    Args:
        name: name of the folder.
        config: the model.
        step: optimizer steps that it has been trained for.
        facts: facts of its run.
        code: files of code in the folder.
        gguf_file: the one file of weights, if it is a GGUF file.
        hf_reads_gguf: ``transformers`` reads such a file too.
        has_tokenizer: the folder holds a tokenizer.
        digest: digest of the birth, if there is no run.
        certificate: the run's (docs/audit.md), with its own digest as ``sha256``.
        averaged: kind of the average of trained weights that it is, in a few words.
    """
    n_params = sum(math.prod(shape) for _, shape in parameter_shapes(config))
    active = f" ({n_params - idle:,} of them for each token)" if (idle := n_idle(config)) else ""
    more = f', gguf_file="{gguf_file}"' if gguf_file else ", trust_remote_code=True" if code else ""
    if hf_reads_gguf:
        library = "transformers"
        # The tokenizer has no code, but AutoTokenizer reads the model's config class first, and asks whether it may.
        tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{one_line(name)}"{more})' if has_tokenizer else ""
        load = _LOAD.format(name=one_line(name), more=more, tokenizer=tokenizer).replace("\n\n```\n", "\n```\n")
    else:
        library, load = "llama.cpp", _GGUF.format(file=gguf_file)
    trained = f"after {number_of(step, 'step')} of training" if step else "at birth: it has not been trained"
    trained += f", {averaged}" if averaged else ""
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- birthmark\n---",
        f"# {one_line(name)}",
        f"A decoder-only transformer of {n_params:,} parameters{active}, {trained}, written by `birthmark export`.",
        "## Loading",
        load + ("\n" + _CODE.format(files=" and ".join(f"`{file}`" for file in code)) if code else ""),
        "## Architecture",
        "Fields of `birthmark.models.config.ModelConfig`, sizes first, then all that is not the default.",
        _table(("field", "value"), _architecture(config)),
        "## Birth",
        _birth(facts.birth.get("digest", digest), bool(facts.birth.get("init_from")), certificate),
    ]
    if data := _data(facts.birth.get("data") or {}):
        parts += ["## Training data", _table(("", ""), data)]
    if facts.snapshot is not None:
        parts += [f"## Measured at step {facts.snapshot.step:,}", _table(("", "", ""), _figures(facts))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _architecture(config: ModelConfig) -> list[tuple[str, str]]:
    sizes = {
        "d_model": config.d_model,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.kv_heads,
        "head_dim": config.d_head,
        "d_ff": config.ff,
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_seq_len,
    }
    default = dotted(asdict(ModelConfig()))
    others = {name: value for name, value in dotted(asdict(config)).items() if value != default[name]}
    fields = sizes | {name: value for name, value in others.items() if name not in sizes}
    return [(f"`{name}`", str(value)) for name, value in fields.items()]


def _birth(digest: str | None, continued: bool, certificate: Mapping[str, Any] | None) -> str:
    if certificate is not None:
        rows = [(what.replace("_", " "), f"`{value}`") for what, value in certificate["commitments"].items()]
        return (
            "The run was certified: its certificate commits to the seed and to what was born of it, without saying "
            "either.\n\n" + _table(("commitment to", ""), [*rows, ("certificate", f"`{certificate['sha256']}`")])
        )
    if digest is None:
        return "Not known: the folder was written without its run's records."
    if continued:
        return f"It began from another model's weights. SHA-256 of every parameter as it began: `{digest}`."
    return (
        f"SHA-256 of every parameter at birth: `{digest}`. The config and the run's seed alone draw the same weights "
        "again, and `birthmark fingerprint` tells whether a model comes from them."
    )


def _data(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    counts = {
        what: ", ".join(f"{value:,} {part}" for part, value in data[what].items())
        for what in ("documents", "tokens", "bytes")
        if data.get(what)
    }
    plain = {
        "kind": data.get("kind"),
        **counts,
        "vocabulary": data.get("vocab_size"),
        "bytes per token": _number(data.get("bytes_per_token"), ".2f"),
        "unigram entropy": _number(data.get("unigram_entropy"), ".3f"),
        "SHA-256 of the corpus": data.get("content_hash"),
        "SHA-256 of the tokenizer": data.get("tokenizer_hash"),
    }
    return [(what, one_line(value)) for what, value in plain.items() if value is not None]


def _number(value: float | None, spec: str) -> str | None:
    return None if value is None else format(value, spec)


def _figures(facts: RunFacts) -> list[tuple[str, str, str]]:
    assert facts.snapshot is not None
    rows = snapshot_figures(facts.snapshot)
    if facts.loss is not None:
        step, value = facts.loss
        loss = LOGGED["val/loss"]
        rows = [("Validation loss", format_value(value, loss.format), f"{loss.unit}, step {step:,}"), *rows]
    return rows


def dequantised_card(
    name: str, file: str, model_type: str, kinds: Mapping[str, int], dtype: str, has_tokenizer: bool
) -> str:
    """Write the card of a model that was read from GGUF, in Markdown.

    Args:
        name: name of the folder.
        file: the GGUF file's name.
        model_type: ``model_type`` of ``config.json``.
        kinds: storage of its weights: type → number of tensors.
        dtype: their present type.
        has_tokenizer: the folder holds a tokenizer.
    """
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{one_line(name)}")' if has_tokenizer else ""
    load = _LOAD.format(name=one_line(name), more="", tokenizer=tokenizer).replace("\n\n```\n", "\n```\n")
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- birthmark\n---",
        f"# {one_line(name)}",
        f"A {one_line(model_type)} model that `birthmark export` read from the GGUF file `{one_line(file)}`. Its "
        f"weights were stored as {kinds_in_words(kinds)}. They are {dtype} here, with the values to which "
        "they were rounded.",
        "## Loading",
        load,
    ]
    return "\n\n".join(parts)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table([Column(title, "text") for title in titles], rows).markdown()
