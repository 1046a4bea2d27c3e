"""The Trainer of transformers with snapshots, on random tokens and on text: python transformers_trainer.py OUT."""

import argparse
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

import birthmark as bm

OUT = Path(sys.argv[1])
TEXT = Path(argparse.__file__)  # a file of Python's library

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.train([str(TEXT)], trainers.BpeTrainer(vocab_size=512, special_tokens=["<s>"], show_progress=False))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", pad_token="<s>")

ids = tokenizer(TEXT.read_text()).input_ids
rows = [{"input_ids": ids[i : i + 64], "labels": ids[i : i + 64]} for i in range(0, len(ids) - 64, 64)]

set_seed(0)
config = GPT2Config(
    vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
arguments = TrainingArguments(
    output_dir=str(OUT / "trainer"),
    max_steps=60,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    logging_steps=20,
    save_strategy="no",
    report_to="none",  # "wandb": the snapshots' scalars are logged there beside the loss
    disable_tqdm=True,
    use_cpu=True,
)
snapshots = bm.TrainerSnapshot(OUT / "bias", every=30, text=str(TEXT))  # read by the Trainer's tokenizer
trainer = Trainer(
    GPT2LMHeadModel(config),
    arguments,
    train_dataset=rows,
    processing_class=tokenizer,
    callbacks=[snapshots],
)
trainer.train()

for row in trainer.state.log_history:
    if "bias_text/sink_mass" in row:
        print(f"step {row['step']}: sink mass on text {row['bias_text/sink_mass']:.3f}")
