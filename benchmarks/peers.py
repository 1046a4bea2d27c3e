"""One training step of one shape in birthmark, transformers and litgpt, each in a process of its own.

A worker builds its model, says what it built, then answers each line it reads with the seconds of one step: rounds over
several workers interleave, and only one of them computes at a time. Every library gets the same batch, float32 weights
under the same autocast, the fused attention of torch, no key/value cache, and the fastest of the losses offered below.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any, Tensor], Tensor]

#: An allocator that keeps what it got: no page of a step's large tensors is asked for again at the next step.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True)
class Shape:
    """A LLaMA-like decoder, by default ``configs/models/llama-152m.yaml``, and the batch that it is trained on."""

    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    d_ff: int = 3072
    vocab_size: int = 50304
    seq_len: int = 1024
    micro_batch: int = 1
    tie_embeddings: bool = True

    def batch(self) -> Tensor:
        """Token ids ``[B, T+1]``."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocab_size, (self.micro_batch, self.seq_len + 1), generator=generator)


def timed_step(model: nn.Module, loss: Loss, batch: Tensor, bf16: bool) -> float:
    """Seconds of forward, loss, backward, and dropping the gradients."""
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        value = loss(model, batch)
    value.backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------------------
# The libraries: a model in training mode, and the losses that it may be trained with


def cross_entropy(logits_BTV: Tensor, batch: Tensor) -> Tensor:
    """The plainest loss there is."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch[:, 1:].flatten())


def birthmark(shape: Shape) -> tuple[nn.Module, dict[str, Loss]]:
    from birthmark.models.birth import born
    from birthmark.models.config import ModelConfig
    from birthmark.trainer.allocator import keep_freed_memory
    from birthmark.trainer.module import next_token_loss

    keep_freed_memory()  # as a run does; with --keep-memory all libraries have it
    model = born(ModelConfig(**llama(shape)), 0).train()
    return model, {"the trainer's": lambda model, batch: next_token_loss(model, batch).objective}


def llama(shape: Shape) -> dict[str, Any]:
    """The shape as fields of our config."""
    fields = asdict(shape)
    fields["max_seq_len"] = fields.pop("seq_len")
    del fields["micro_batch"]
    return {**fields, "mlp": "swiglu", "norm_eps": 1e-6}


def transformers(shape: Shape) -> tuple[nn.Module, dict[str, Loss]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.d_model,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_heads,
        intermediate_size=shape.d_ff,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.seq_len,
        tie_word_embeddings=shape.tie_embeddings,
        use_cache=False,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()

    def own(model: Any, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        return model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss

    def plain(model: Any, batch: Tensor) -> Tensor:
        return cross_entropy(model(input_ids=batch[:, :-1], use_cache=False).logits, batch)

    return model, {"its own": own, "F.cross_entropy": plain}


def litgpt(shape: Shape) -> tuple[nn.Module, dict[str, Loss]]:
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        n_embd=shape.d_model,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        intermediate_size=shape.d_ff,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        block_size=shape.seq_len,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        mlp_class_name="LLaMAMLP",
    )

    def own(model: Any, batch: Tensor) -> Tensor:
        return chunked_cross_entropy(model(batch[:, :-1]), batch[:, 1:])

    def plain(model: Any, batch: Tensor) -> Tensor:
        return cross_entropy(model(batch[:, :-1]), batch)

    model = GPT(config).train()
    if shape.tie_embeddings:
        model.transformer.wte.weight = model.lm_head.weight  # as its pretraining does it
    return model, {"its own, chunked": own, "F.cross_entropy": plain}


LIBRARIES = {"birthmark": birthmark, "transformers": transformers, "litgpt": litgpt}


# ------------------------------------------------------------------------------------------------------------------
# Workers


class Worker:
    """A process that takes one step for each line that it reads."""

    def __init__(
        self, python: Path | str, library: str, shape: Shape, *, bf16: bool, compiled: bool, threads: int
    ) -> None:
        self.process = subprocess.Popen(
            [str(python), __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        spec = {"library": library, "shape": asdict(shape), "bf16": bf16, "compiled": compiled, "threads": threads}
        #: What the worker built: parameters, versions, the loss that it is fastest with.
        self.built: dict[str, Any] = self._ask(json.dumps(spec))

    def step(self) -> float:
        """Seconds of one step."""
        return self._ask("step")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()

    def _ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended with status {self.process.wait()}: see above")
        return json.loads(answer)


def serve() -> None:
    """Answer a :class:`Worker`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    spec = json.loads(sys.stdin.readline())
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    shape, name, bf16 = Shape(**spec["shape"]), spec["library"], spec["bf16"]
    model, losses = LIBRARIES[name](shape)
    batch = shape.batch()
    if spec["compiled"]:
        losses = {kind: torch.compile(loss) for kind, loss in losses.items()}
    best = {}
    for kind, loss in losses.items():
        timed_step(model, loss, batch, bf16)
        best[kind] = min(timed_step(model, loss, batch, bf16) for _ in range(3 if len(losses) > 1 else 1))
    chosen = min(best, key=lambda kind: best[kind])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        first_loss = losses[chosen](model, batch).item()
    built = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "version": importlib.metadata.version(name),
        "torch": torch.__version__,
        "loss": chosen,
        "losses, s": best,
        "first loss": first_loss,
    }
    print(json.dumps(built), file=answers)
    for _ in sys.stdin:
        print(json.dumps(timed_step(model, losses[chosen], batch, bf16)), file=answers)


if __name__ == "__main__":
    serve()
