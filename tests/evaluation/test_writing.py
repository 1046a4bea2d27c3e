"""Text written after prompts of several lengths at once, against one prompt alone and all of its tokens each time."""

import copy
import json
from dataclasses import asdict

import pytest
import torch

from birthmark.evaluation.harness import Prompt, write
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

SHAPE = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=40, max_seq_len=16)
#: Longer and shorter than one another, one that is asked for nothing, and two that end early.
PROMPTS = [Prompt(range(3, 3 + n), n_new) for n, n_new in [(5, 6), (1, 9), (9, 3), (2, 0), (4, 8), (7, 7), (1, 1)]]


def is_over(i, written):
    return i in (1, 4) and len(written) == 2 + i


def alone(model, prompt, i):
    """The slow way: the whole text is read for every token."""
    tokens = list(prompt.tokens)
    written = []
    while len(written) < prompt.n_new and not (written and is_over(i, written)):
        with torch.no_grad():
            written.append(int(model(torch.tensor([tokens + written]))[0, -1].argmax()))
    return written


@pytest.fixture(scope="module")
def model(enliven):
    return enliven(born(SHAPE, 0))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_what_is_written_is_that_of_each_prompt_alone(model, batch_size):
    model.train()
    random = torch.get_rng_state()
    found = write(model, PROMPTS, batch_size, is_over)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert found == [alone(model.eval(), prompt, i) for i, prompt in enumerate(PROMPTS)]
    assert [len(one) for one in found] == [6, 3, 3, 0, 6, 7, 1]
    assert len({token for one in found for token in one}) > 5
    assert write(model, [], batch_size, is_over) == []


SCRIPT = """
import json, os, sys
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import torch
import torch.distributed as dist
from birthmark.evaluation.harness import Prompt, write
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.trainer.config import TrainerConfig
from birthmark.trainer.strategies.fsdp2 import sharder

def is_over(i, written):
    return i in (1, 4) and len(written) == 2 + i

dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
found = {}
for gather in ("fp32", "bf16"):
    model = Decoder(ModelConfig(**SHAPE))
    model.load_state_dict(torch.load(store + ".pt"))
    sharder(TrainerConfig(strategy="fsdp2", precision="bf16-mixed", gather=gather), torch.device("cpu"))(model)
    for size in (2, 5):
        prompts = [Prompt(tokens, n_new) for tokens, n_new in PROMPTS]
        found[f"{gather} {size}"] = write(model, prompts, size, is_over)
with open(out, "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


def test_two_ranks_with_sharded_weights_write_what_one_does(model, two_ranks, tmp_path):
    torch.save(model.state_dict(), tmp_path / "store.pt")
    fields = {name: value for name, value in asdict(SHAPE).items() if not isinstance(value, dict)}
    prompts = [[list(prompt.tokens), prompt.n_new] for prompt in PROMPTS]
    files = two_ranks(f"SHAPE, PROMPTS = {fields}, {prompts}\n" + SCRIPT, ".json")
    one, other = (json.loads(file.read_text()) for file in files)
    assert one == other
    expected = write(model, PROMPTS, 64, is_over)
    assert one["fp32 2"] == one["fp32 5"] == expected
    # What is gathered in bf16 is rounded, and multiplied in float32. Tables are not rounded.
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if not name.startswith("embed."):
                parameter.copy_(parameter.bfloat16())
    assert one["bf16 2"] == one["bf16 5"] == write(rounded, PROMPTS, 64, is_over)
