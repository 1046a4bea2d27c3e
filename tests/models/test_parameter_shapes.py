"""Parameters counted from the config alone are those of the model, for random configs of every kind."""

from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from birthmark.errors import UsageError
from birthmark.models.config import AttentionConfig, CalibrationConfig, ExpertsConfig, LatentConfig, ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.parameter_shapes import parameter_shapes


@st.composite
def configs(draw):
    """Any config that is possible; the choices are read from its types."""
    n_heads = draw(st.sampled_from([1, 2, 4]))
    sizes = {
        "d_model": 4 * n_heads,
        "n_layers": draw(st.integers(1, 3)),
        "n_heads": n_heads,
        "n_kv_heads": draw(st.sampled_from([None, 1])),
        "head_dim": draw(st.sampled_from([None, 6])),
        "d_ff": draw(st.sampled_from([None, 10])),
        "vocab_size": 24,
        "max_seq_len": 12,
    }
    calibration = draw(st.builds(CalibrationConfig, correlation=st.sampled_from(["none", "learned", "estimated"])))
    blocks = draw(st.sampled_from([None, [0]]))
    of_attention, of_model = (
        draw(st.fixed_dictionaries({}, optional=_choices(kind))) for kind in (AttentionConfig, ModelConfig)
    )
    # What is read under few configs would be refused under most of those that are drawn.
    if of_attention.get("gate", "none") == "none":
        of_attention = {name: value for name, value in of_attention.items() if not name.startswith("gate")}
    if of_attention.get("aggregation") == "differential_norm":
        of_attention["normaliser"] = "differential"
    if of_attention.get("normaliser") == "differential":
        sizes["n_kv_heads"] = None
        of_attention.pop("normalise_rows", None), of_attention.pop("kv_bias", None)
    latent = draw(st.sampled_from([LatentConfig(), LatentConfig(6), LatentConfig(6, 5, 2, 3, 4)]))
    if latent.is_on:
        sizes |= {"n_kv_heads": None}
        of_model["positions"] = "rope"
        of_attention = {name: value for name, value in of_attention.items() if name not in ("qk_norm", "v_norm")}
    experts = draw(st.sampled_from([ExpertsConfig(), ExpertsConfig(3), ExpertsConfig(2, 1, True, 6, 8, 1)]))
    while True:
        try:
            attention = AttentionConfig(
                **of_attention, latent=latent, calibration=calibration, aggregation_blocks=blocks
            )
            return ModelConfig(**sizes, **of_model, attention=attention, experts=experts)
        except UsageError:
            # Most of what is drawn excludes something else of it: fields are left out until what is left is possible.
            drawn = of_attention or of_model
            assume(drawn)
            drawn.pop(draw(st.sampled_from(sorted(drawn))))


def _choices(kind):
    """Fields of a config that have named choices or are flags, with all of them."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        options = get_args(hint)
        if hint is bool:
            found[name] = st.booleans()
        elif get_origin(hint) is Literal:
            found[name] = st.sampled_from(options)
        elif options and get_origin(options[0]) is Literal:  # or a class of the user's own
            found[name] = st.sampled_from(get_args(options[0]))
        elif set(options) == {bool, type(None)}:
            found[name] = st.sampled_from([True, False, None])
    return found


@pytest.mark.heavy
@settings(max_examples=75)
@given(configs())
def test_names_and_shapes_are_those_of_the_model(config):
    with torch.device("meta"):
        model = Decoder(config)
    expected = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert list(parameter_shapes(config)) == expected
