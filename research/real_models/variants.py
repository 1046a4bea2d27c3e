"""Models that are made of a real one and stand beside it: rounded, pruned, tuned, and a birth of its config.

Each is written once, as a folder of ``transformers``. Matrices of the blocks are changed, embedding and head are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...files import atomic_path, write_json
from ...locks import hold_lock
from ...measure.quantised.rounding import rounded

#: Tuning: steps, sequences in each, tokens in each sequence, learning rate of AdamW.
STEPS, SEQUENCES, TOKENS, LR = 60, 4, 64, 1e-4
#: Share of the smallest weights of each matrix that pruning sets to zero.
PRUNED = 0.3


@dataclass(frozen=True)
class Source:
    """A real model and what its variants need."""

    file: Path
    """GGUF file."""
    folder: Path
    """Folder of the variants."""
    text: Path
    """Folder of texts that tuning reads; the last tenth of them is held out."""


@dataclass(frozen=True)
class Variant:
    """A change of a model."""

    base: str | None
    """Name of the variant that it begins with; None: the model of the GGUF file."""
    change: Callable[[Any, Any, Path], Mapping[str, Any] | None]
    """Change a model in place, given its tokenizer and the folder of texts; return what is worth keeping."""


def variant(source: Source, name: str) -> Path:
    """Return the folder of a variant, made at first use; processes that ask for one at once wait for the first."""
    out = source.folder / f"{source.file.stem}-{name}"
    source.folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(out.with_name(f"{out.name}.lock")):
        if not out.exists():
            with atomic_path(out) as new:
                _write(source, VARIANTS[name], new, is_birth=name == "twin")
    return out


def _write(source: Source, made: Variant, new: Path, is_birth: bool) -> None:
    """Write the folder of a variant."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    file = source.file
    if made.base is None:
        # The library refuses to save what it read from GGUF: the weights move to a model of the same config.
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        vars(config).pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if not is_birth:
            read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            model.load_state_dict(read.state_dict())
    else:
        model = AutoModelForCausalLM.from_pretrained(variant(source, made.base), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    kept = made.change(model, tokenizer, source.text)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    if kept is not None:
        write_json(new / "about.json", dict(kept))


def _matrices(model: Any) -> Iterator[Tensor]:
    """Yield the weights of the linear maps of the blocks."""
    for module in model.get_decoder().modules():
        if isinstance(module, nn.Linear):
            yield module.weight.data


def _unchanged(model: Any, tokenizer: Any, text: Path) -> None:
    """Change nothing."""


def _round(bits: int) -> Callable[[Any, Any, Path], None]:
    """Return a change to so many bits, each row by a scale of its own."""

    def change(model: Any, tokenizer: Any, text: Path) -> None:
        for weight_OI in _matrices(model):
            weight_OI.copy_(rounded(weight_OI, bits, 1))

    return change


def _to_bfloat16(model: Any, tokenizer: Any, text: Path) -> None:
    """Round every parameter to bfloat16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def _prune(model: Any, tokenizer: Any, text: Path) -> None:
    """Set the smallest weights of each matrix to zero."""
    for weight_OI in _matrices(model):
        size_OI = weight_OI.abs()
        weight_OI[size_OI <= size_OI.flatten().kthvalue(int(PRUNED * size_OI.numel())).values] = 0.0


def _tune(model: Any, tokenizer: Any, text: Path) -> Mapping[str, Any]:
    """Train all parameters on text, under bfloat16 autocast with float32 weights; report the loss on held-out text."""
    files = sorted(text.glob("*.txt"))
    first_held_out = len(files) * 9 // 10
    ids_NT, held_out_NT = (_sequences(tokenizer, part) for part in (files[:first_held_out], files[first_held_out:]))
    order = torch.randperm(len(ids_NT), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    before = _loss(model, held_out_NT)
    model.train()
    for step in range(STEPS):
        batch_BT = ids_NT[order[torch.arange(step * SEQUENCES, (step + 1) * SEQUENCES) % len(order)]]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch_BT, labels=batch_BT, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return {
        "steps": STEPS, "sequences": SEQUENCES, "tokens": TOKENS, "lr": LR,
        "held_out_loss_before": before, "held_out_loss_after": _loss(model, held_out_NT),
    }  # fmt: skip


def _sequences(tokenizer: Any, files: list[Path]) -> Tensor:
    """Read texts one after the other, cut into sequences ``[N, T]``."""
    ids = torch.tensor(tokenizer("\n\n".join(file.read_text(encoding="utf-8") for file in files)).input_ids)
    return ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)


@torch.no_grad()
def _loss(model: Any, ids_NT: Tensor) -> float:
    """Compute the mean loss of the next tokens, nats."""
    model.eval()
    losses = [model(ids_BT, labels=ids_BT, use_cache=False).loss * len(ids_BT) for ids_BT in ids_NT.split(8)]
    return float(torch.stack(losses).sum() / len(ids_NT))


VARIANTS: Mapping[str, Variant] = {
    "twin": Variant(None, _unchanged),
    "float": Variant(None, _unchanged),
    "bf16": Variant("float", _to_bfloat16),
    "w8": Variant("float", _round(8)),
    "w4": Variant("float", _round(4)),
    "pruned": Variant("float", _prune),
    "tuned": Variant("float", _tune),
    "tuned_pruned": Variant("tuned", _prune),
    "tuned_pruned_w4": Variant("tuned_pruned", _round(4)),
}
