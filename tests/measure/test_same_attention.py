"""A wrong attention is found in every block and dtype; rounding beside activations of 10⁴ is none."""

import re

import pytest
import torch
import transformers

from birthmark.errors import UsageError
from birthmark.measure.hf import HFModel
from birthmark.measure.hf.attention_scores import FamilyScores
from birthmark.measure.hf.same_attention import times_allowed
from birthmark.models.attention.fused.backends import over_heads
from birthmark.models.attention.positions import Placement

transformers.logging.set_verbosity_error()

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
_SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_GROUPED = _SMALL | {"num_key_value_heads": 2}
_GEMMA = _GROUPED | {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 3}
MODELS = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma3_text": ("Gemma3ForCausalLM", _GEMMA | {"layer_types": [*["sliding_attention"] * 2, "full_attention"]}),
    "gpt_neox": ("GPTNeoXForCausalLM", _SMALL),
}
FAULTS = ["mask", "scale", "window", "softcap"]


class Planted:
    """An attention by the explicit formula in the model's dtype, with a fault in one block (from 0)."""

    def __init__(self):
        self.fault, self.block = None, None
        self.change = 0.0  # of the output, over its size

    def __call__(self, module, query, key, value, attention_mask, scaling=None, softcap=None, **more):
        right = self.attend(query, key, value, attention_mask, scaling, softcap)
        if self.fault is None or module.layer_idx != self.block:
            return right.transpose(1, 2).contiguous(), None
        mask = attention_mask[..., : key.shape[2]].clone()
        query_T1, key_S = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        if self.fault == "mask":
            mask.masked_fill_((key_S == query_T1 - 2) & (query_T1 > 8), torch.finfo(mask.dtype).min)
        elif self.fault == "window":
            mask.masked_fill_(key_S <= query_T1 - 5, torch.finfo(mask.dtype).min)
        elif self.fault == "scale":
            scaling = scaling * 1.5
        elif self.fault == "softcap":
            softcap = 1.0 if softcap is None else None
        wrong = self.attend(query, key, value, mask, scaling, softcap)
        self.change = ((wrong - right).double().norm() / right.double().norm()).item()
        return wrong.transpose(1, 2).contiguous(), None

    def attend(self, query, key, value, mask, scaling, softcap):
        key, value = (over_heads(x, query.shape[1]) for x in (key, value))
        scores = query @ key.mT * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores + mask[..., : key.shape[2]]
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


@pytest.fixture
def planted():
    """An attention that is right until it is told a fault and a block."""
    from transformers.masking_utils import eager_mask

    made = Planted()
    transformers.AttentionInterface.register("planted", made)
    transformers.AttentionMaskInterface.register("planted", eager_mask)
    return made


@pytest.fixture
def small_model(enliven):
    """``small_model(name, dtype, massive)``: a model that runs the planted attention; massive, one channel of its
    stream reaches 10⁴ from block 1 on."""

    def build(name, dtype, massive=False):
        architecture, config = MODELS[name]
        kind = getattr(transformers, architecture)
        model = enliven(kind(kind.config_class(**config, attn_implementation="planted")))
        if massive:
            with torch.no_grad():
                if "gemma" in name:
                    model.model.layers[0].post_feedforward_layernorm.weight[5] = 10_000
                else:
                    is_last = re.compile(r"\.0\.mlp\.(down|dense_4h).*weight").search
                    (last,) = (p for name, p in model.named_parameters() if is_last(name))
                    last[5] *= 40_000 / first_state(model)[..., 5].abs().max()
        return model.to(dtype)

    return build


@torch.no_grad()
def first_state(model):
    """What leaves the first block."""
    tokens = torch.arange(24)[None]
    return model(tokens, output_hidden_states=True).hidden_states[1]


def found(model):
    """The block, from 0, whose attention is refused; None where none is."""
    try:
        HFModel(model).unseen()
    except UsageError as error:
        return int(re.search(r"after the attention of block (\d+), by \S+ times what rounding in ", str(error))[1]) - 1
    return None


#: Every pair of a model, a dtype, and whether a channel is massive.
CASES = [(name, dtype, (i + j) % 2 == 1) for i, name in enumerate(MODELS) for j, dtype in enumerate(DTYPES)]


@pytest.mark.parametrize(("name", "dtype", "massive"), CASES)
def test_a_wrong_attention_is_found_in_every_block_and_a_right_one_in_none(name, dtype, massive, small_model, planted):
    model = small_model(name, dtype, massive)
    if massive:
        assert 10_000 < first_state(model).abs().max() < 60_000
    assert found(model) is None
    too_small = 0
    for planted.fault in FAULTS:
        for planted.block in range(model.config.num_hidden_layers):
            where = found(model)
            # A change within the last digit of the outputs is none.
            if where is None and planted.change < torch.finfo(dtype).eps:
                too_small += 1
            else:
                assert where == planted.block, (planted.fault, planted.block, planted.change)
    assert too_small <= massive


def test_a_pass_that_is_another_one_outside_of_the_attention_is_refused_by_its_logits(small_model, planted):
    model = small_model("llama", torch.bfloat16)

    def scaled(module, args, output):
        return output * (1.25 if model.config._attn_implementation == "birthmark" else 1.0)

    model.model.layers[-1].mlp.register_forward_hook(scaled)
    with pytest.raises(UsageError, match=r"first differs in the logits, by \S+ times what rounding in"):
        HFModel(model).unseen()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_rounding_that_sends_a_token_to_another_expert_is_no_difference(name, family_model):
    """Also where many tokens stand between two experts: a router of small weights."""
    model = family_model(name, "sdpa").to(torch.bfloat16)
    with torch.no_grad():
        for module_name, parameter in model.named_parameters():
            if "mlp.gate.weight" in module_name:
                parameter.mul_(0.01)
    assert all(place.place != "attention" for place in HFModel(model).unseen())


@pytest.mark.parametrize("n_rows", [9, 1])
def test_a_block_of_scores_is_the_rows_of_all_scores(n_rows):
    """Longer sequences than those of the other tests are scored some queries at a time."""
    q, k = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 4)
    added, seen, minus = torch.randn(1, 3, n_rows, 9), torch.rand(2, 1, n_rows, 9) > 0.3, torch.randn(2, 3, 9)
    scores = FamilyScores(q, k, 0.5, Placement(), 5, softcap=2.0, added=added, seen=seen)
    place = torch.arange(9)
    before = place[:, None] - place
    expected = 2 * torch.tanh(0.5 * q @ k.mT / 2) + added - minus[..., None]
    sees = (before >= 0) & (before < 5) & seen
    for start, stop in ((0, 9), (0, 4), (4, 7), (7, 9)):
        found, found_seen = scores.block(start, stop, minus)
        n_keys = found.shape[-1]
        assert not sees.expand(2, 3, 9, 9)[:, :, start:stop, n_keys:].any()
        torch.testing.assert_close(found, expected[:, :, start:stop, :n_keys])
        assert torch.equal(found_seen.expand(2, 1, -1, -1), sees[:, :, start:stop, :n_keys])


def test_one_row_all_rows_and_a_channel_beside_a_massive_one_are_judged():
    own = torch.randn(1, 1024, 16)
    one, massive = own.clone(), own * torch.tensor([1e4, *[1.0] * 15])
    one[0, 5] *= 1 + 6e-3
    channel = massive.clone()
    channel[..., 3] *= 1 + 2e-2
    # Rounding moves every number by a thousandth: the row by 6 times that, all rows by 3 times, a channel by 20 times.
    for theirs, observed in ((own, one), (own, own * (1 + 3e-3)), (massive, channel)):
        assert 1.4 < times_allowed(theirs, observed, observed * (1 + 1e-3)) < 4
    assert times_allowed(own, own, own * (1 + 1e-3)) == 0
