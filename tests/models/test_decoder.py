"""The whole decoder: equal to the field's own models, causal, observed without a trace."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_arms import ARMS, EXACT
from oracles import Seen
from torch.nn import functional as F

from birthmark.errors import UsageError
from birthmark.models.attention.positions import Placement
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.decoder import choose, generate

SMALL = {"d_model": 32, "n_layers": 3, "n_heads": 4, "d_ff": 48, "vocab_size": 61, "max_seq_len": 24}
KINDS = {
    "gated, normed queries and keys": AttentionConfig("headnorm", gate="channel", qk_norm="head"),
    "sink, window, key bias": AttentionConfig(normaliser="softmax_sink", window=10, kv_bias="key_value"),
} | {
    name: ARMS[name]
    for name in (
        "plain", "headnorm", EXACT, "exact, attenuate, t_ref None, gradient True",
        "analytic, amplify, t_ref None, gradient True", "analytic, attenuate, t_ref None, gradient True",
        "exact, amplify, ρ learned", "sigmoid", "elu, normalised",
    )
}  # fmt: skip
POSITIONS = ["rope", "learned", "sinusoidal", "alibi", "t5", "none"]


@pytest.mark.parametrize(
    ("mlp", "reference"),
    [
        ("relu", lambda u, g: np.maximum(u, 0)),
        ("silu", lambda u, g: u / (1 + np.exp(-u))),
        ("tanh", lambda u, g: np.tanh(u)),
        ("identity", lambda u, g: u),
        ("swiglu", lambda u, g: g / (1 + np.exp(-g)) * u),
        ("reglu", lambda u, g: np.maximum(g, 0) * u),
        ("gelu", lambda u, g: u * gaussian_cdf(u)),
        ("geglu", lambda u, g: g * gaussian_cdf(g) * u),
        ("relu2", lambda u, g: np.maximum(u, 0) ** 2),
        ("gelu_tanh", lambda u, g: 0.5 * u * (1 + np.tanh((2 / np.pi) ** 0.5 * (u + 0.044715 * u**3)))),
        ("relu2glu", lambda u, g: np.maximum(g, 0) ** 2 * u),
        ("tanhglu", lambda u, g: np.tanh(g) * u),
        ("bilinear", lambda u, g: g * u),
    ],
)
def test_every_mlp_is_the_formula_of_its_name(mlp, reference, lively):
    block = lively(ModelConfig(**SMALL, mlp=mlp, bias=True)).blocks[1].mlp.double()
    x = np.random.default_rng(0).normal(size=(2, 5, 32))
    weights = {name: p.detach().numpy() for name, p in block.named_parameters()}

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    gate = linear("gate", x) if "gate.weight" in weights else None
    expected = linear("down", reference(linear("up", x), gate))
    np.testing.assert_allclose(block(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def gaussian_cdf(x):
    from scipy.stats import norm

    return norm.cdf(x)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_logits_and_losses_are_soft_capped(tie_embeddings, lively, random_tokens):
    config = ModelConfig(**SMALL, tie_embeddings=tie_embeddings)
    model, capped = lively(config), lively(replace(config, logit_softcap=0.5))
    tokens = random_tokens(config)
    expected = 0.5 * np.tanh(model(tokens).detach().numpy() / 0.5)
    np.testing.assert_allclose(capped(tokens).detach().numpy(), expected, atol=1e-6)
    losses = capped(tokens[:, :-1], targets_BS=tokens[:, 3:]).per_token
    by_torch = F.cross_entropy(torch.from_numpy(expected)[:, 2:-1].transpose(1, 2), tokens[:, 3:], reduction="none")
    torch.testing.assert_close(losses, by_torch)


class Recorder:
    """An observer that keeps the order and the shapes of what it is shown."""

    def __init__(self):
        self.calls = []

    def residual(self, site, layer, h_BTD):
        self.calls.append((site, layer, tuple(h_BTD.shape)))

    def attention(self, layer, attended):
        shown = [x for x in vars(attended).values() if isinstance(x, torch.Tensor)]
        self.calls += [("heads", layer, tuple(x.shape)) for x in shown]

    def neurons(self, layer, a_BTF):
        self.calls.append(("neurons", layer, tuple(a_BTF.shape)))


@pytest.mark.parametrize("n_kv_heads", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_observer_sees_the_documented_places_in_order(kind, n_kv_heads, lively, random_tokens):
    config = ModelConfig(**SMALL, n_kv_heads=n_kv_heads, attention=KINDS[kind])
    model, recorder = lively(config), Recorder()
    tokens = random_tokens(config)
    with torch.no_grad():
        model(tokens, observer=recorder)
    stream, expected = (3, 24, 32), [("embedding", 0, (3, 24, 32))]
    for layer in (1, 2, 3):
        expected += [("heads", layer, (3, 4, 24, 8))] * 5
        expected += [("attention", layer, stream), ("neurons", layer, (3, 24, config.ff)), ("mlp", layer, stream)]
    assert recorder.calls == expected


@pytest.mark.parametrize("kind", [kind for kind, attention in KINDS.items() if attention.normaliser == "softmax"])
def test_what_an_observer_sees_is_what_its_name_says(kind, lively, random_tokens):
    config = ModelConfig(**SMALL, n_kv_heads=2, attention=KINDS[kind])
    model, seen, tokens = lively(config), Seen(), random_tokens(config)
    with torch.no_grad():
        logits = model(tokens, observer=seen)
        before = seen.residuals["embedding", 0]
        assert torch.equal(before, model.embed.weight[tokens])
        for layer, block in enumerate(model.blocks, start=1):
            heads = seen.attended[layer]
            q, k = heads.q_BHTK.double(), heads.k_BHTK.double()
            a = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(24, 24).triu(1) > 0, -torch.inf).softmax(-1)
            # The values' own heads, each shared by two query heads.
            v = F.linear(block.norm_attn(before), block.attn.v.weight).double().view(3, 24, 2, 8).transpose(1, 2)
            v = torch.stack([v[:, 0], v[:, 0], v[:, 1], v[:, 1]], dim=1)
            torch.testing.assert_close(heads.v_BHTK.double(), v)
            torch.testing.assert_close(heads.weights.rows(0, 24).double(), a, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(heads.o_BHTK.double(), a @ v, atol=1e-5, rtol=1e-5)
            after_attention, after = seen.residuals["attention", layer], seen.residuals["mlp", layer]
            attended = block.attn(block.norm_attn(before), model.positions.place(24, tokens.device))
            read = heads.out_BHTK.transpose(1, 2).flatten(2)
            torch.testing.assert_close(F.linear(read, block.attn.o.weight), attended)
            torch.testing.assert_close(after_attention, before + attended)
            torch.testing.assert_close(after, after_attention + block.mlp(block.norm_mlp(after_attention)))
            torch.testing.assert_close(after, after_attention + F.linear(seen.units[layer], block.mlp.down.weight))
            before = after
        torch.testing.assert_close(F.linear(model.norm(before), model.head.weight), logits)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_observer_changes_no_bit_of_the_logits(kind, positions, lively, random_tokens):
    config = ModelConfig(**SMALL, positions=positions, attention=KINDS[kind])
    model, tokens = lively(config), random_tokens(config)
    with torch.no_grad():
        state = torch.get_rng_state()
        assert torch.equal(model(tokens), model(tokens, observer=Seen()))
        assert torch.equal(model(tokens, last_only=True), model(tokens, last_only=True, observer=Seen()))
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_logit_depends_on_a_later_token(kind, positions, lively, random_tokens):
    config = ModelConfig(**SMALL, positions=positions, attention=KINDS[kind])
    model, tokens = lively(config), random_tokens(config)
    with torch.no_grad():
        logits = model(tokens)
        for t in (1, 11, 23):
            changed = tokens.clone()
            changed[:, t] = (tokens[:, t] + 1) % 61
            again = model(changed)
            assert torch.equal(logits[:, :t], again[:, :t])
            # It does reach every position from t on, so that the line above says something.
            assert ((logits[:, t:] - again[:, t:]).abs().amax(-1) > 1e-4).all()
            # Nor do logits depend on how long the sequence goes on.
            torch.testing.assert_close(model(tokens[:, :t]), logits[:, :t], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_matter_only_where_there_are_any(positions, lively, random_tokens):
    config = ModelConfig(**SMALL, positions=positions)
    model, tokens = lively(config), random_tokens(config)
    # One block alone: from the causal mask a second one learns the order.
    model.blocks = model.blocks[:1]
    order = torch.cat([torch.arange(22, -1, -1), torch.tensor([23])])
    with torch.no_grad():
        difference = (model(tokens, last_only=True) - model(tokens[:, order], last_only=True)).abs().max()
    assert difference < 1e-5 if positions == "none" else difference > 1e-2


def test_more_tokens_than_learned_positions_are_refused_and_not_wrapped(random_tokens):
    for max_seq_len in (1, 24):
        config = ModelConfig(**SMALL | {"max_seq_len": max_seq_len}, positions="learned")
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            born(config, 0)(random_tokens(config, length=max_seq_len + 4))


def test_sinusoidal_positions_are_the_published_waves(lively, random_tokens):
    config = ModelConfig(**SMALL, positions="sinusoidal")
    model, tokens, seen = lively(config), random_tokens(config), Seen()
    model(tokens, observer=seen)
    waves = np.empty((24, 32))
    for t in range(24):
        for i in range(16):
            angle = t / 10000 ** (2 * i / 32)
            waves[t, 2 * i], waves[t, 2 * i + 1] = np.sin(angle), np.cos(angle)
    embedding = seen.residuals["embedding", 0]
    np.testing.assert_allclose((embedding - model.embed.weight[tokens]).detach(), np.stack([waves] * 3), atol=1e-6)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "none"])
def test_norms_on_both_sides_and_side_by_side(norm, parallel, lively):
    """By hand, from the block's own attention and MLP and a norm written out."""
    placement = "both" if norm != "none" else "pre"
    config = ModelConfig(**SMALL, norm=norm, norm_placement=placement, parallel_residual=parallel, bias=True)
    block = lively(config).blocks[1].double()
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gains = {name: p for name, p in block.named_parameters() if name.startswith("norm")}
    assert len(gains) == {"rmsnorm": 4, "layernorm": 8, "none": 0}[norm]

    def normed(name, y):
        if norm == "none":
            return y
        if norm == "layernorm":
            y = y - y.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * gains[f"{name}.gain"]
        return y + gains[f"{name}.bias"] if norm == "layernorm" else y

    attended = x + normed("norm_attn_out", block.attn(normed("norm_attn", x), Placement()))
    read = x if parallel else attended
    expected = attended + normed("norm_mlp_out", block.mlp(normed("norm_mlp", read)))
    torch.testing.assert_close(block(x, Placement()), expected, atol=1e-12, rtol=1e-12)


# ---------------------------------------------------------------- writing a token at a time
# The likeliest from the whole pass, and draws with the softmax's frequencies.


@pytest.mark.parametrize(
    ("positions", "prefix"), [("rope", None), ("learned", None), ("alibi", None), ("rope", 3), ("rope", 6)]
)
def test_greedy_generation_equals_the_whole_pass_each_time(positions, prefix, lively):
    """Also of a prompt that is shorter than a prefix."""
    attention = AttentionConfig("headnorm", window=6, normaliser="softmax_sink", prefix=prefix)
    model = lively(ModelConfig(**SMALL | {"max_seq_len": 20}, positions=positions, attention=attention)).eval()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = tokens
    with torch.no_grad():
        for _ in range(17):
            expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    written = torch.stack(list(generate(model, tokens, 17, temperature=0)), dim=1)
    assert torch.equal(written, expected[:, 3:])


def test_choices_have_the_softmax_frequencies_and_no_others_than_the_top():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    drawn = choose(logits.expand(20000, -1), 0.5, None, generator).bincount(minlength=4) / 20000
    # A standard error of at most √(¼/20000) = .0035.
    torch.testing.assert_close(drawn, (logits / 0.5).softmax(-1)[0], atol=4 * 0.0035, rtol=0)
    top = choose(logits.expand(2000, -1), 5.0, 2, generator).bincount(minlength=4)
    assert (top[:2] > 500).all()
    assert (top[2:] == 0).all()
    # As many as asked for where others are as likely, and the likeliest at a temperature next to 0.
    assert len(choose(torch.zeros(2000, 50), 1.0, 3, generator).unique()) == 3
    assert choose(logits, 1e-39, None, generator).tolist() == [0]


def test_learned_positions_end_where_their_table_does():
    config = ModelConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=50, max_seq_len=8, positions="learned")
    model, tokens = born(config, 0).eval(), torch.tensor([[1, 2, 3]])
    assert len(list(generate(model, tokens, 6, temperature=0))) == 6
    with pytest.raises(UsageError, match="at most 6 tokens"):
        next(generate(model, tokens, 7, temperature=0))
