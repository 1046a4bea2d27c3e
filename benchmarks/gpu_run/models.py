"""Models that parts measure, by their usual sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from libraries import Shape, model_fields

from birthmark.models.config import ModelConfig


@dataclass(frozen=True)
class Sized:
    """A model with the batch that it is trained on."""

    name: str
    shape: Shape

    def config(self, seq_len: int | None = None) -> ModelConfig:
        """Return its config, at its own length or another."""
        shape = self.shape if seq_len is None else replace(self.shape, seq_len=seq_len)
        return ModelConfig(**model_fields(shape))


#: For rehearsals: both architectures, and a batch of two.
TINY = Sized("tiny", Shape(32, 1, 2, 1, 48, 64, 16, 2, tie_embeddings=False))
TINY_GPT2 = Sized("tiny, GPT-2's architecture", Shape(32, 1, 2, 0, 128, 64, 16, 2, gpt2=True))
#: configs/models/gpt2-124m.yaml with a vocabulary of a multiple of 64.
GPT2_124M = Sized("124M", Shape(seq_len=1024, micro_batch=16, gpt2=True))
#: configs/models/llama-160m.yaml.
LLAMA_134M = Sized("134M", Shape(d_ff=2048, vocab_size=32000, micro_batch=16, tie_embeddings=False))
#: configs/models/tinyllama-1.1b.yaml.
LLAMA_1B = Sized("1.1B", Shape(2048, 22, 32, 4, 5632, 32000, 2048, 8, tie_embeddings=False))
#: configs/llama2_7b.yaml.
LLAMA_7B = Sized("7B", Shape(4096, 32, 32, 0, 11008, 32000, 4096, 2, tie_embeddings=False))
