"""What the null ``matched`` reads of a model: against the modules, and those of transformers by their names."""

import numpy as np
import pytest
import torch

from birthmark.errors import UsageError
from birthmark.measure import stream_weights as stream_reading
from birthmark.measure.hf import HFModel
from birthmark.measure.stream_weights import gains_before, stream_weights
from birthmark.metrics.matched_weights import compare_weights
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64, "max_seq_len": 8, "d_ff": 24}


def decoder(enliven, **fields):
    return enliven(born(ModelConfig(**(SMALL | fields)), 0, "cpu"))


def test_units_are_rows_that_read_and_columns_that_write_with_the_gains_before_them(enliven):
    model = decoder(enliven, mlp="swiglu", norm_placement="both")
    found = stream_weights(model)
    block = model.blocks[1]
    mlp = found.units["blocks.1.mlp"]
    attn = found.units["blocks.1.attn"]
    assert (mlp.shape, attn.shape, mlp.dtype) == ((24, 3, 16), (4, 2 + 4, 16), np.float32)
    for d in (0, 11):
        for f in (0, 23):
            read = block.norm_mlp.gain[d]
            expected = [block.mlp.up.weight[f, d] * read, block.mlp.gate.weight[f, d] * read]
            expected.append(block.mlp.down.weight[d, f] * block.norm_mlp_out.gain[d])
            np.testing.assert_allclose(mlp[f, :, d], [x.item() for x in expected], rtol=1e-6)
        expected = [block.attn.v.weight[head * 4 + 3, d] * block.norm_attn.gain[d] for head in range(2)]
        expected += [block.attn.o.weight[d, head * 4 + 3] * block.norm_attn_out.gain[d] for head in range(4)]
        np.testing.assert_allclose(attn[3, :, d], [x.item() for x in expected], rtol=1e-6)
    np.testing.assert_allclose(found.tables["head"], (model.head.weight * model.norm.gain).detach(), rtol=1e-6)
    np.testing.assert_array_equal(found.tables["embedding"], model.embed.weight.detach())
    assert list(stream_weights(decoder(enliven, tie_embeddings=True)).tables) == ["embedding"]


@pytest.mark.heavy
def test_an_exported_model_is_its_decoder(enliven, tmp_path):
    """One as our decoder, the other by transformers' own modules."""
    import transformers

    model = decoder(enliven, mlp="swiglu")
    save_pretrained(model, tmp_path)
    ours = stream_weights(model)
    theirs = stream_weights(HFModel(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)))
    for name, table in ours.tables.items():
        np.testing.assert_allclose(theirs.tables[name], table, rtol=1e-5)
    for block in ("blocks.0.", "blocks.1."):
        np.testing.assert_allclose(theirs.units[f"{block}mlp"], ours.units[f"{block}mlp"], rtol=1e-5)
        # Of the values only the map that writes has a name in every family.
        np.testing.assert_allclose(theirs.units[f"{block}attn"], ours.units[f"{block}attn"][:, 2:], rtol=1e-5)
    assert compare_weights(ours, theirs).verdict == "kin"


def test_more_units_and_tokens_than_are_read_are_thinned_out(enliven, monkeypatch):
    model = decoder(enliven)
    whole = stream_weights(model)
    monkeypatch.setattr(stream_reading, "MOST_UNITS", 5)
    monkeypatch.setattr(stream_reading, "MOST_HEADS", 2)
    monkeypatch.setattr(stream_reading, "MOST_TOKENS", 9)
    some = stream_weights(model)
    np.testing.assert_array_equal(some.units["blocks.0.mlp"], whole.units["blocks.0.mlp"][[0, 6, 12, 17, 23]])
    # Both of the heads with values of their own, and the first and last of those that write.
    np.testing.assert_array_equal(some.units["blocks.0.attn"], whole.units["blocks.0.attn"][:, [0, 1, 2, 5]])
    assert some.tables["embedding"].shape == (9, 16)


@pytest.mark.parametrize(
    ("family", "norm", "plus", "final"),
    [
        ("mistral", "post_attention_layernorm", 0, "model.norm"),
        ("gemma", "post_attention_layernorm", 1, "model.norm"),
        ("gemma2", "pre_feedforward_layernorm", 1, "model.norm"),
        ("phi", "input_layernorm", 0, "model.final_layernorm"),
        ("gpt_neo", "ln_2", 0, "transformer.ln_f"),
        ("olmo3", None, 0, "model.norm"),
    ],
)
def test_the_norm_before_a_map_is_found_whatever_the_family_calls_it(family_model, family, norm, plus, final):
    model = family_model(family)
    gains, head = gains_before(HFModel(model))
    base = model.base_model
    blocks = getattr(base, "layers", None) or base.h
    assert sorted(gains) == ([] if norm is None else [1, 2])
    for layer, gain in gains.items():
        torch.testing.assert_close(gain, blocks[layer - 1].get_submodule(norm).weight + plus, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head, model.get_submodule(final).weight + plus, atol=1e-4, rtol=1e-4)
    found = stream_weights(HFModel(model))
    sizes = {len(units) for name, units in found.units.items() if name.endswith("mlp")}
    assert sizes == {128 if family == "gpt_neo" else 48}


def test_tables_of_another_width_than_the_stream_are_one_line(family_model):
    with pytest.raises(UsageError, match="embeddings of width 16, its residual stream 32: the null matched aligns"):
        stream_weights(HFModel(family_model("opt post-norm, narrow table")))
