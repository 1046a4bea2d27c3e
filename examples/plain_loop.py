"""A plain PyTorch loop that takes snapshots itself: python plain_loop.py OUT."""

import argparse
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import birthmark as bm

# The bytes of a file of Python's library, in rows of 64.
text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
rows = text[: len(text) // 64 * 64].view(-1, 64)

torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **shape))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

recorder = bm.SnapshotRecorder(Path(sys.argv[1]) / "bias", tokens_per_step=16 * 64)
recorder.take(model, 0)  # the birth, which later snapshots are compared with
for step in range(1, 61):
    batch = rows[torch.randint(len(rows), (16,))]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 30 == 0:
        bias = recorder.take(model, step).bias
        print(f"step {step}: loss {loss.item():.2f}, sink mass {bias['sink_mass']:.3f}, drift {bias['drift']:.3f}")
