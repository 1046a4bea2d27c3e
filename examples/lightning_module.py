"""A LightningModule of your own around a causal LM of transformers, with snapshots: python lightning_module.py OUT."""

import argparse
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import birthmark as bm

OUT = Path(sys.argv[1])


class LanguageModel(L.LightningModule):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        shape = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **shape))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


# The bytes of a file of Python's library, in rows of 64.
text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
rows = TensorDataset(text[: len(text) // 64 * 64].view(-1, 64))

L.seed_everything(0)
trainer = L.Trainer(
    max_steps=60,
    accelerator="cpu",
    callbacks=[bm.BiasSnapshot(OUT / "bias", every=30)],
    logger=CSVLogger(OUT, name="", version="log"),
    enable_checkpointing=False,
    enable_progress_bar=False,
    log_every_n_steps=20,
)
trainer.fit(LanguageModel(), DataLoader(rows, batch_size=16, shuffle=True))

run = bm.Run(OUT / "bias")
for snapshot in run.snapshots:
    print(f"step {snapshot.step}: sink mass {snapshot.scalars['sink_mass']:.3f}, drift {snapshot.scalars['drift']:.3f}")
