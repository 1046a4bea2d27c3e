"""The names and the words of what an attention runs on; that they are true is tested beside attention itself."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import birthmark
from birthmark.errors import UsageError
from birthmark.models.attention import fused
from birthmark.models.attention.kernel_choice import KERNELS, explicit_because, kernel_name, kernel_sentence
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig

ANALYTIC, JOINT = CalibrationConfig(n_eff="analytic"), CalibrationConfig(squares="joint")
SEPARATE = CalibrationConfig(squares="separate")
NAMES = [
    (ModelConfig(), "fused"),
    (ModelConfig(positions="t5"), "explicit"),
    (ModelConfig(attention=AttentionConfig(normaliser="relu", window=8)), "explicit"),
    (ModelConfig(positions="alibi"), "fused + distances + log-sum-exp"),
    (ModelConfig(positions="alibi", attention=AttentionConfig(prefix=4)), "explicit"),
    (ModelConfig(attention=AttentionConfig(window=8, prefix=4)), "fused + window + prefix + log-sum-exp"),
    (ModelConfig(attention=AttentionConfig(normaliser="softmax_sink")), "fused + log-sum-exp"),
    (ModelConfig(attention=AttentionConfig(normaliser="softmax_off_by_one")), "fused + log-sum-exp"),
    (ModelConfig(attention=AttentionConfig(normaliser="softmax_clipped")), "explicit"),
    (ModelConfig(attention=AttentionConfig(normaliser="softpick")), "explicit"),
    (ModelConfig(attention=AttentionConfig(normaliser="differential")), "fused + difference"),
    (ModelConfig(attention=AttentionConfig(kv_bias="key")), "fused + log-sum-exp"),
    (ModelConfig(attention=AttentionConfig(kv_bias="value")), "fused"),
    (ModelConfig(attention=AttentionConfig("calibrated")), "fused + joint + log-sum-exp"),
    (ModelConfig(attention=AttentionConfig("calibrated", calibration=SEPARATE)), "fused + n_eff + log-sum-exp"),
    (ModelConfig(attention=AttentionConfig("calibrated"), head_dim=256), "fused + n_eff + log-sum-exp"),
    (ModelConfig(attention=AttentionConfig("calibrated", calibration=ANALYTIC)), "fused"),
    (ModelConfig(attention=AttentionConfig("calibrated", calibration=JOINT)), "fused + joint + log-sum-exp"),
]


@pytest.mark.parametrize(("config", "name"), NAMES, ids=[f"{i} {name}" for i, (_, name) in enumerate(NAMES)])
def test_a_config_has_the_name_of_what_it_adds(config, name):
    assert kernel_name(config) == name
    assert (explicit_because(config) is not None) == (name == "explicit")
    sentence = kernel_sentence(config)
    for part, words in KERNELS.items():
        assert (words in sentence) == (part in name.split(" + ")), part


def test_the_sentence_reads_on_and_names_the_field_that_forbids_the_fused_kernels():
    both = kernel_sentence(ModelConfig(attention=AttentionConfig(window=8, prefix=4)))
    assert both.startswith("fused scaled_dot_product_attention (bf16 on CPU")
    assert both.endswith(
        "32 MiB), two such attentions per window (bf16 on CUDA and by our kernel on CPU: one), one more such attention "
        "for the prefix; "
        "log-sum-exps from the kernels, their gradients in the same backward pass"
    )
    assert kernel_sentence(ModelConfig(positions="t5")).endswith("in the backward pass (model.positions t5)")


def test_of_a_class_of_the_users_own_only_its_name_is_known():
    own = ModelConfig(positions="t5", attention=AttentionConfig(normaliser="mine:A", gate="mine:B"))
    assert kernel_name(own) == "its own"
    assert kernel_sentence(own) == (
        "what a class of your own runs (model.attention.normaliser mine:A, model.attention.gate mine:B)"
    )


def test_a_torch_that_computes_wrong_attention_is_refused(monkeypatch):
    (least,) = re.findall(r'"torch>=([\d.]+)"', (Path(birthmark.__file__).parent / "pyproject.toml").read_text())
    monkeypatch.setattr(torch, "__version__", "2.8.1+cpu")
    with pytest.raises(UsageError, match=rf"^torch 2\.8\.1\+cpu computes wrong .* needs {least} or later; pip install"):
        importlib.reload(fused)
    monkeypatch.setattr(torch, "__version__", f"{least}.0a0+git1")
    importlib.reload(fused)
