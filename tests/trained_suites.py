"""Short trainings whose checkpoints an audit reads."""

import torch

from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained

CONFIG = ModelConfig(d_model=32, n_layers=2, n_heads=2, vocab_size=64, max_seq_len=16)
STEPS = (0, 4, 8, 12, 16, 20, 24)


def constant(step):
    return 1.0


def train(seed, folder, steps=STEPS, schedule=constant, model=None, language=0):
    """A short training on a bigram language, with a folder of transformers at each of the steps."""
    model, numbers = model or born(CONFIG, seed).train(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    table = torch.randperm(64, generator=torch.Generator().manual_seed(language))
    for step in range(steps[0], steps[-1] + 1):
        if step in steps:
            save_pretrained(model, folder / f"step-{step}")
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * schedule(step)
        tokens = [torch.randint(64, (8, 1), generator=numbers)]
        for _ in range(15):
            noise = torch.rand(8, 1, generator=numbers) < 0.2
            tokens.append(torch.where(noise, torch.randint(64, (8, 1), generator=numbers), table[tokens[-1]]))
        read = torch.cat(tokens, 1)
        optimizer.zero_grad()
        model(read[:, :-1], targets_BS=read[:, 1:]).objective.backward()
        optimizer.step()
    return folder


def weights_file(suite, step):
    return suite / f"step-{step}" / "model.safetensors"


def exchange(suite, a, b):
    files = [weights_file(suite, step).read_bytes() for step in (a, b)]
    weights_file(suite, a).write_bytes(files[1])
    weights_file(suite, b).write_bytes(files[0])
