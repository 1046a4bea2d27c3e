"""A model that leaves with its own code is the same function, in the hands of the library and without us."""

import ast
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from torch import Tensor

import birthmark
from birthmark.errors import RunError, UsageError
from birthmark.models.attention.normalisers import Softmax
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig, nested
from birthmark.models.decoder import generate
from birthmark.models.exchange.exported.assembly import exported_code
from birthmark.models.exchange.exported.config_fields import config_of_fields, resolved_fields
from birthmark.models.exchange.pretrained import load_pretrained, read_pretrained, write_pretrained
from birthmark.models.exchange.written_layout import decoder_layout, layout_of

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "vocab_size": 61, "max_seq_len": 24}
#: What configs/studies/sinks.yaml has no arm for.
MORE = {
    "grouped heads": {"n_kv_heads": 2, "attention.normaliser": "softmax_sink"},
    "post-norm": {"norm_placement": "post", "attention.qk_norm": "width"},
    "both norms": {"norm_placement": "both", "logit_softcap": 5.0},
    "layer norm": {"norm": "layernorm", "bias": True, "mlp": "relu2", "norm_gate": 3},
    "tanh for a norm": {"norm": "dyt", "bias": True, "norm_gate": 3},
    "scales before norms": {"norm_scale": True},
    "no norm": {"norm": "none", "positions": "sinusoidal"},
    "parallel": {"parallel_residual": True, "rope_fraction": 0.5, "mlp": "geglu"},
    "tied": {"tie_embeddings": True, "mlp": "swiglu", "head_dim": 6},
    "alibi and a prefix": {"positions": "alibi", "attention.prefix": 4},
    "alibi and a window": {"positions": "alibi", "attention.window": 5, "n_kv_heads": 1},
    "documents": {"attention.documents": True},
    "differential": {
        "attention.normaliser": "differential", "attention.aggregation": "differential_norm", "positions": "alibi",
    },
    "learned keys": {"attention.kv_bias": "key_value", "attention.kv_bias_tokens": 3, "attention.v_norm": "head"},
    "latent": {"attention.latent.kv_rank": 6, "attention.latent.q_rank": 5, "attention.gate": "channel"},
    "narrow values": {
        "attention.latent.kv_rank": 6, "attention.latent.value_width": 3, "attention.normaliser": "softmax_sink",
    },
    "blocks apart": {"attention.window": [4, None], "attention.nope_blocks": [1]},
    "a gate of silu": {"attention.gate": "channel", "attention.gate_activation": "silu", "attention.gate_at": "key"},
    "experts": {"mlp": "swiglu", "experts.n_experts": 4, "experts.n_dense": 1, "experts.d_shared": 8},
    "in some blocks": {"attention.aggregation": "headnorm", "attention.aggregation_blocks": [1]},
}  # fmt: skip


def arms():
    study = yaml.safe_load(Path(birthmark.__file__).parent.joinpath("configs/studies/sinks.yaml").read_text())
    every = study["arms"] | MORE
    fields = {name: {field.removeprefix("model."): x for field, x in arm.items()} for name, arm in every.items()}
    return {name: config_of_fields(ModelConfig, nested(SMALL | arm)) for name, arm in fields.items()}


ARMS = arms()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The module of the exported file."""
    folder = tmp_path_factory.mktemp("code") / "exported_model"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for file, text in exported_code().items():
        (folder / file).write_text(text)
    sys.path.insert(0, str(folder.parent))
    yield importlib.import_module("exported_model.modeling_birthmark")
    sys.path.remove(str(folder.parent))


def with_the_librarys_methods(exported, ours):
    model = exported.BirthmarkForCausalLM(exported.BirthmarkConfig(**resolved_fields(ours.config)))
    model.decoder.load_state_dict(ours.state_dict())
    return model.eval()


@pytest.mark.heavy
@torch.no_grad()
def test_every_arm_is_the_same_function_whole_in_pieces_and_padded(exported, lively, random_tokens):
    for name, config in ARMS.items():
        ours = lively(config).eval()
        theirs = with_the_librarys_methods(exported, ours)
        tokens_BT = random_tokens(config, n=2, length=12)
        expected = ours(tokens_BT)
        torch.testing.assert_close(theirs(tokens_BT).logits, expected, atol=1e-5, rtol=1e-4, msg=name)

        if config.attention.prefix is None:
            cache, parts = transformers.DynamicCache(config=theirs.config), []
            for piece in tokens_BT.split([7, 1, 3, 1], dim=1):
                parts.append(theirs(piece, past_key_values=cache).logits)
            torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-4, msg=name)

            padded_BT, mask_BT = tokens_BT.clone(), torch.ones_like(tokens_BT)
            padded_BT[1, 3:], mask_BT[1, :3] = tokens_BT[1, :-3], 0
            cache = transformers.DynamicCache(config=theirs.config)
            parts = []
            for at, n_seen in ((slice(0, 9), 9), ([9], 10), ([10], 11), ([11], 12)):
                more = {"attention_mask": mask_BT[:, :n_seen], "cache": cache}  # its name since version 5.24
                parts.append(theirs(padded_BT[:, at], **more).logits)
            found = torch.cat(parts, 1)
            torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4, msg=name)
            torch.testing.assert_close(found[1, 3:], expected[1, :-3], atol=1e-5, rtol=1e-4, msg=name)


def test_moments_of_values_stay_float32(exported, lively):
    theirs = with_the_librarys_methods(exported, lively(ARMS["correlated_attenuate"])).to(torch.bfloat16)
    assert {tensor.dtype for tensor in theirs.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in theirs.buffers()} == {torch.float32}


def test_a_cache_has_one_name_at_a_time(exported, lively, random_tokens):
    theirs = with_the_librarys_methods(exported, lively(ARMS["prefix_4"]).eval())
    cache = transformers.DynamicCache(config=theirs.config)
    with pytest.raises(ValueError, match=r"^cache and past_key_values are two names of one: give it by one of them$"):
        theirs(random_tokens(ARMS["prefix_4"], n=1, length=6), past_key_values=cache, cache=cache)


@torch.no_grad()
@pytest.mark.parametrize("name", ["positions_alibi", "correlated_attenuate", "prefix_4"])
def test_greedy_text_is_ours(exported, lively, random_tokens, name):
    ours = lively(ARMS[name]).eval()
    tokens_BT = random_tokens(ARMS[name], n=2, length=6)
    expected = torch.stack(list(generate(ours, tokens_BT, 6, temperature=0)), dim=1)
    theirs = with_the_librarys_methods(exported, ours)
    for more in ({}, {"use_cache": False}, {"num_beams": 1, "logits_to_keep": 1}, {"cache_implementation": "static"}):
        found = theirs.generate(tokens_BT, max_new_tokens=6, do_sample=False, **more)
        assert torch.equal(found[:, 6:], expected), more


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax_sink", "window_16", "positions_learned"])
def test_greedy_text_of_padded_sequences_is_that_of_each_alone(exported, lively, random_tokens, name):
    ours = lively(ARMS[name]).eval()
    theirs = with_the_librarys_methods(exported, ours)
    tokens_BT, mask_BT = random_tokens(ARMS[name], n=2, length=6), torch.ones(2, 6, dtype=torch.int64)
    alone = [tokens_BT[:1], tokens_BT[1:, 2:]]
    mask_BT[1, :2] = 0
    expected = [torch.stack(list(generate(ours, tokens_1T, 6, temperature=0)), dim=1)[0] for tokens_1T in alone]
    for kind in ("dynamic", "static"):
        settings = {"do_sample": False, "cache_implementation": kind, "pad_token_id": 0}
        found = theirs.generate(tokens_BT, attention_mask=mask_BT, max_new_tokens=6, **settings)
        assert torch.equal(found[:, 6:], torch.stack(expected)), kind
    # As the library writes a mask for a static cache, for kernels that take one of bools.
    seen_B1TS = mask_BT.bool()[:, None, None] & torch.ones(6, 6).tril().bool()
    found_BTV, expected_BTV = (theirs(tokens_BT, attention_mask=mask).logits for mask in (seen_B1TS, mask_BT))
    assert torch.equal(found_BTV, expected_BTV)


@pytest.mark.parametrize("name", ["softmax_sink", "window_16", "exact_attenuate", "prefix_4"])
def test_loss_and_gradients_are_ours(exported, lively, random_tokens, name):
    ours = lively(ARMS[name]).train()
    theirs = with_the_librarys_methods(exported, ours).train()
    tokens_BT = random_tokens(ARMS[name], n=2)
    targets_BT = tokens_BT[:, 1:].clone()
    if name == "prefix_4":
        targets_BT[:, :3] = -100  # seen as they are predicted
    expected = ours(tokens_BT[:, :-1], targets_BS=targets_BT).objective
    found = theirs(tokens_BT, labels=tokens_BT).loss
    torch.testing.assert_close(found, expected)
    expected.backward(), found.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.decoder.named_parameters()}
    for parameter, tensor in ours.named_parameters():
        torch.testing.assert_close(gradients[parameter], tensor.grad, atol=1e-6, rtol=1e-4, msg=parameter)


@torch.no_grad()
def test_states_and_weights_are_shown_as_the_library_shows_them(exported, lively, random_tokens):
    ours = lively(ARMS["softmax_sink"]).eval()
    theirs = with_the_librarys_methods(exported, ours)
    tokens_BT = random_tokens(ours.config, n=2, length=9)
    shown = theirs(tokens_BT, output_hidden_states=True, output_attentions=True, logits_to_keep=2)
    assert len(shown.hidden_states) == 3
    assert torch.equal(shown.hidden_states[0], ours.embed(tokens_BT))
    torch.testing.assert_close(shown.hidden_states[-1] @ ours.head.weight.T, ours(tokens_BT), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(shown.logits, ours(tokens_BT)[:, -2:], atol=1e-5, rtol=1e-4)
    first = shown.attentions[0]
    assert first.shape == (2, 4, 9, 9)
    assert not first.triu(1).any()
    assert (first.sum(-1) < 1).all()  # the sink has the rest


def test_the_code_is_that_of_our_sources_and_needs_torch_and_transformers_alone():
    root = Path(birthmark.__file__).parent
    files = [
        *(root / f"{name}.py" for name in ("errors", "kernel_devices", "schema")),
        *root.joinpath("models").rglob("*.py"),
    ]
    sources = "\n".join(file.read_text() for file in files)
    lines = set(sources.splitlines())
    code = exported_code()
    assert list(code) == ["configuration_birthmark.py", "modeling_birthmark.py"]
    assert exported_code.__wrapped__() == code
    for text in code.values():
        foreign = {name.split(".")[0] for node in ast.walk(ast.parse(text)) for name in imported(node)}
        assert {name for name in foreign if name and name not in sys.stdlib_module_names} <= {"torch", "transformers"}
        assert all(len(line) <= 120 for line in text.splitlines())
        _, _, body = text.partition("\n# ---")
        assert all(line in lines for line in body.splitlines() if not line.startswith(("#", "-")))
        blocks = [block.strip("\n") for block in body.split("\n\n")]
        whole = [block for block in blocks if block.startswith(("class ", "def ", "    ", "@"))]
        assert len(whole) > len(blocks) / 2
        assert all(block in sources for block in whole)


def imported(node) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


@pytest.fixture
def without_us(monkeypatch, modules_folder):
    """Nothing of birthmark can be imported; code that a model brings is copied to a folder of the tests'."""
    for name in [name for name in sys.modules if name.split(".")[0] == "birthmark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "birthmark", None)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules_folder)
    transformers.logging.disable_progress_bar()


@pytest.fixture
def written(tmp_path, lively):
    """A folder with code in it, and the model that was written."""
    config = replace(ARMS["correlated_attenuate"], positions="learned")
    ours = lively(config).eval()
    write_pretrained(config, ours.state_dict(), tmp_path / "model", layout=layout_of(config))
    return tmp_path / "model", ours


def opened(folder, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **more)


@torch.no_grad()
@pytest.mark.heavy
def test_a_folder_opens_without_birthmark_and_is_saved_again(written, tmp_path, random_tokens, without_us):
    folder, ours = written
    with pytest.raises(ImportError):
        importlib.import_module("birthmark.models")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers, config.head_dim) == ("birthmark", 16, 2, 4)
    tokens_BT = random_tokens(ours.config, n=2, length=12)
    model, info = opened(folder, output_loading_info=True)
    assert not any(info.values())
    logits = model(tokens_BT).logits
    torch.testing.assert_close(logits, ours(tokens_BT), atol=1e-5, rtol=1e-4)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(opened(tmp_path / "again")(tokens_BT).logits, logits)
    narrow = opened(folder, dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert narrow.decoder.blocks[0].attn.aggregate.rho.square_H.dtype == torch.float32
    assert (narrow(tokens_BT).logits - logits).abs().max() < 0.05 * logits.abs().max()


#: In a process of its own, in which birthmark cannot be imported: one step of the library's trainer.
_TRAINER = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "birthmark"]:
    del sys.modules[name]
sys.modules["birthmark"] = None
import torch, transformers
import transformers.dynamic_module_utils as modules
folder, modules.HF_MODULES_CACHE = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokens = torch.randint(61, (2, 12))
before = model.eval()(tokens, labels=tokens).loss
settings = transformers.TrainingArguments(
    output_dir=f"{folder}/run", max_steps=1, per_device_train_batch_size=2, report_to=[], save_strategy="no",
    use_cpu=True, learning_rate=1e-2, lr_scheduler_type="constant", disable_tqdm=True,
)
rows = [{"input_ids": row, "labels": row} for row in tokens]
transformers.Trainer(model=model, args=settings, train_dataset=rows).train()
after = model.eval()(tokens, labels=tokens).loss
assert after < before, (before, after)
"""


@pytest.mark.slow
def test_the_librarys_trainer_trains_it_without_birthmark(written, tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", _TRAINER, str(written[0]), str(tmp_path / "cache")]
    assert subprocess.run(command, check=False).returncode == 0


def test_a_folder_comes_back_as_the_model_that_it_was(tmp_path):
    for name in ("correlated_estimated", "tied", "in some blocks"):
        config, folder = ARMS[name], tmp_path / name
        ours = born(config, 3)
        write_pretrained(config, ours.state_dict(), folder, layout=decoder_layout(config), max_shard_bytes=3000)
        assert resolved_fields(read_pretrained(folder).config) == resolved_fields(config)
        found: dict[str, Tensor] = load_pretrained(folder).state_dict()
        assert found.keys() == ours.state_dict().keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in ours.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": "polar"}, "positions is 'polar', not one of 'rope'"),
        ({"n_heads": "4"}, "n_heads is '4', not a whole number"),
        ({"birthmark_fields": ["d_model", "droppath"], "droppath": 0.1}, "droppath: there is no such field"),
        ({"birthmark_fields": ["d_model", "droppath"]}, "droppath is missing: give it"),
        ({"birthmark_fields": None}, "birthmark_fields is None, not a list"),
        ({"attention": {"gate": 3}}, "attention.gate is 3, not"),
        ({"attention": {"sponge": 3}}, "attention.sponge: there is no such field"),
        ({"d_model": 18}, "model.d_model 18 is not divisible by model.n_heads 4"),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path, change, message):
    config = ModelConfig(**SMALL)
    content = decoder_layout(config).config | ({"head_dim": None} if "d_model" in change else {})
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises((UsageError, RunError)) as raised:
        read_pretrained(tmp_path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_what_cannot_be_done_is_refused(exported, lively):
    theirs = with_the_librarys_methods(exported, lively(ARMS["plain"]))
    tokens_BT = torch.zeros(2, 4, dtype=torch.int64)
    for row, message in (([1, 0, 1, 1], "padding between tokens"), ([1, 1, 1], r"has shape \[2, 3\]: give \[2, 4\]")):
        with pytest.raises(ValueError, match=message):
            theirs(tokens_BT, attention_mask=torch.tensor([row] * 2))
    prefixed = with_the_librarys_methods(exported, lively(ARMS["prefix_4"]))
    with pytest.raises(ValueError, match="see one another, pad none"):
        prefixed(tokens_BT, attention_mask=torch.tensor([[0, 1, 1, 1]] * 2))
    with pytest.raises(ValueError, match="the cache has 2: give as many tokens at once, or use_cache=False"):
        prefixed.eval().generate(tokens_BT[:, :2], max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="vocabulary of this model is fixed"):
        theirs.resize_token_embeddings(70)


class Own(Softmax):
    """A normaliser of the user's own."""


def test_a_class_of_the_users_own_stays_here():
    name = f"{__name__}:Own"
    config = ModelConfig(**SMALL, attention=AttentionConfig(normaliser=name))
    with pytest.raises(UsageError, match=f"model.attention.normaliser {name}: a class of your own is not exported"):
        layout_of(config)


def test_the_librarys_own_class_is_used_where_it_has_one():
    llama = ModelConfig(**SMALL, mlp="swiglu")
    assert layout_of(llama).model_type == "llama"
    assert layout_of(llama, own_code=True).model_type == layout_of(ARMS["headnorm"]).model_type == "birthmark"
