"""Roles against a list by name, for a model that has every kind of parameter."""

import re
from dataclasses import replace

import pytest
import torch

from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.init import ParameterRole, parameter_roles

SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=24, max_seq_len=12)

#: Ends of names → role, written down by hand.
BY_NAME = {
    r"(q|k|v|o|gate|up|down|map)\.weight": "matrix",
    r"^head\.weight": "head",
    r"(^|\.)embed\.weight": "embedding",
    r"positions\.table\.weight": "embedding",
    r"\.gain$": "gain",
    r"\.bias$": "bias",
    r"attn\.bias\.(key|value)": "bias",
    r"logit": "bias",
}
ARMS = {
    "gpt2": replace(SMALL, norm="layernorm", bias=True, positions="learned", tie_embeddings=True),
    "sandwich": replace(
        SMALL,
        norm_placement="both",
        mlp="swiglu",
        attention=AttentionConfig(qk_norm="head", gate="channel", kv_bias="key_value", aggregation="headnorm"),
    ),
    "released": replace(SMALL, attention=AttentionConfig(aggregation="headnorm_released")),
    "learned_sink": replace(SMALL, attention=AttentionConfig(normaliser="softmax_sink")),
    "calibrated": replace(
        SMALL,
        attention=AttentionConfig(aggregation="calibrated", calibration=CalibrationConfig(correlation="learned")),
    ),
}


@pytest.mark.parametrize("arm", ARMS)
def test_roles_are_what_the_names_say(arm):
    with torch.device("meta"):
        model = Decoder(ARMS[arm])
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    for name, role in roles.items():
        expected = {kind for pattern, kind in BY_NAME.items() if re.search(pattern, name)}
        if arm == "released" and name.endswith("aggregate.gain"):
            expected = {"decayed_gain"}
        assert expected == {role.value}, name


def test_a_t5_table_is_a_bias_of_the_scores():
    with torch.device("meta"):
        model = Decoder(replace(SMALL, positions="t5"))
    assert parameter_roles(model)["positions.table.weight"] is ParameterRole.BIAS


def test_a_module_that_states_no_roles_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    with pytest.raises(TypeError, match=r"Linear owns parameters \['weight', 'bias'\] but does not state their roles"):
        parameter_roles(model)
