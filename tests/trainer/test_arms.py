"""Every arm trains, snapshots, checkpoints, resumes and reports: one run for each value that the config offers."""

import json
from itertools import zip_longest

import numpy as np
import pytest
import torch
from quiet_runs import logged, run, up_to

from birthmark.launch.reference.model_fields import build, companions, model_fields
from birthmark.models.attention.config import LATENT_WIDTHS
from birthmark.report.run_page import build_report, summarise
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO

FIELDS = {field.path: field for field in model_fields()}
#: Fields that fail apart: their values share runs, one of each lane in a run.
SHARED = (
    (
        ("model.mlp",),
        # Latent attention's come last, beside parts that it does not exclude.
        ("model.init.kind", *(f"model.attention.latent.{x}" for x in ("kv_rank", *LATENT_WIDTHS))),
        ("model.init.zero",),
        ("model.parallel_residual", "model.tie_embeddings", "model.bias", "model.attention.nope_blocks"),
        ("model.attention.gate_at", "model.attention.gate_input", "model.attention.gate_activation"),
        ("model.attention.clip_alpha", "model.attention.clip_zeta", "model.attention.kv_bias_tokens"),
        ("model.attention.v_norm", "model.norm_gate", "model.norm_scale", "model.experts.renormalise"),
        ("model.attention.kv_bias", "model.attention.qkv_bias"),
    ),
    (
        ("model.attention.aggregation", *(path for path in FIELDS if path.startswith("model.attention.calibration."))),
        ("model.positions",),
        ("model.norm_placement", "model.norm"),
    ),
    (
        ("model.attention.normaliser", "model.attention.normalise_rows", "model.attention.sigmoid_bias"),
        tuple(f"model.attention.{x}" for x in ("kv_bias_shared", "qk_norm", "gate", "window", "prefix", "documents")),
    ),
)


def arms():
    """Name → dotted fields: every value of every field with names, every switch, every setting of attention."""
    found = {}
    shared = {path for lanes in SHARED for lane in lanes for path in lane}
    for path, field in FIELDS.items():
        if path not in shared and (field.choices or field.hint is bool or path.startswith("model.attention.")):
            for value in field.others():
                found[f"{path.removeprefix('model.')}={value}"] = companions({path: value})[0]
    for lanes in SHARED:
        of_lanes = ([(path, value) for path in lane for value in FIELDS[path].others()] for lane in lanes)
        for settings in zip_longest(*of_lanes):
            together = dict(setting for setting in settings if setting is not None)
            name = ", ".join(f"{path.rpartition('.')[2]}={value}" for path, value in together.items())
            found[name] = companions(together)[0]
    return found


def attention(**fields):
    return {f"model.attention.{name.replace('__', '.')}": value for name, value in fields.items()}


#: Sizes of their own, and what meets in one row of weights.
TOGETHER = {
    "plain": {},
    "one key/value head, wide heads, half of each turns": {
        "model.n_kv_heads": 1,
        "model.head_dim": 12,
        "model.rope_fraction": 0.5,
    },
    "few buckets": {"model.positions": "t5", "model.t5_buckets": 4, "model.t5_max_distance": 6},
    "one block calibrated, estimated ρ": attention(
        aggregation="calibrated", aggregation_blocks=[1], calibration__correlation="estimated"
    ),
    "sink, key and value, window, exact, learned ρ": attention(
        aggregation="calibrated",
        normaliser="softmax_sink",
        kv_bias="key_value",
        window=4,
        calibration__correlation="learned",
    ),
    "normalised elu, prefix, window, estimated ρ, one key/value head": attention(
        aggregation="calibrated",
        normaliser="elu",
        normalise_rows=True,
        prefix=5,
        window=3,
        calibration__direction="attenuate",
        calibration__correlation="estimated",
    )
    | {"model.n_kv_heads": 1},
    "alibi, prefix, off by one, head norm, gate": attention(
        normaliser="softmax_off_by_one", prefix=4, aggregation="headnorm", gate="channel"
    )
    | {"model.positions": "alibi"},
    "alibi, window, normalised identity": attention(normaliser="identity", normalise_rows=True, window=4)
    | {"model.positions": "alibi"},
    "t5, relu, value": attention(normaliser="relu", kv_bias="value") | {"model.positions": "t5"},
    "parallel, both norms, tied, biases": {
        "model.parallel_residual": True,
        "model.norm": "layernorm",
        "model.norm_placement": "both",
        "model.tie_embeddings": True,
        "model.bias": True,
    },
}
ARMS = arms() | TOGETHER
SIZES = ("d_model", "n_layers", "n_heads", "vocab_size", "max_seq_len")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Runs are compared with runs of this process, and are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def configured(tiny):
    """A tiny run's config with the model of an arm."""

    def of(arm, overrides):
        small = tiny().model
        sizes = {f"model.{name}": getattr(small, name) for name in SIZES}
        return tiny({"model": build(sizes | ARMS[arm]), **overrides})

    return of


#: Scalars that have no value, and are null in JSON: a cosine with a direction of zeros, ranks of equal probabilities,
#: the ratio of two variances of nothing.
NO_RANKS = {"bias/rank_persistence", "bias/kendall_tau", "bias/rank_persistence_stranger"}
NO_DIRECTION = {"bias/alignment", "bias/alignment_stranger", "bias/drift", "bias/energy_share", "bias/effective_rank"}
NO_VARIANCE = {"bias/variance_discrepancy", "bias/variance_discrepancy_out"}
NO_KEYS, NO_VALUES = ({f"bias/{x}_norm_{where}" for where in ("first", "sink")} for x in ("key", "value"))


def undefined(config):
    zero = set(config.model.init.zero)
    found = (
        (NO_RANKS, {"embed", "head"}),
        (NO_DIRECTION, {"embed"}),
        (NO_VARIANCE, {"embed", "attn.v"}),
        (NO_KEYS, {"embed", "attn.k"}),
        (NO_VALUES, {"embed", "attn.v"}),
    )
    names = {name for names, parts in found if parts & zero for name in names}
    attention = config.model.attention
    if (attention.normaliser, attention.gate_at) == ("softmax_clipped", "key"):
        # Scores of gated keys are small: at birth rows are uniform, and but for the first token's clipped to nothing.
        names |= NO_VARIANCE
    return names


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_trains_snapshots_and_goes_on_bit_for_bit(configured, tmp_path, arm):
    config = configured(arm, {"trainer.max_steps": 4, "snapshot.n_strangers": 1})
    whole = run(config, tmp_path / "whole")
    parts = run(config, up_to(2, whole, tmp_path / "parts").path, resume=True)

    # Parameters, buffers, moments and all.
    a, b = ((done.checkpoint(4) / "tensors.safetensors").read_bytes() for done in (whole, parts))
    assert a == b
    a, b = (done.snapshots()[-1] for done in (whole, parts))
    assert (a.step, b.step) == (4, 4)
    assert a.scalars() == b.scalars()
    assert all(np.array_equal(a.arrays[name], b.arrays[name], equal_nan=True) for name in a.arrays)
    for key in ("train/loss", "train/lr", "val/loss", "val/loss_trigger"):
        assert logged(whole, key) == logged(parts, key), key

    assert [snapshot.step for snapshot in whole.snapshots()] == [0, 2, 4]
    birth = whole.snapshots()[0].scalars()
    assert {name for name, value in birth.items() if value is None} == undefined(config)
    for snapshot in whole.snapshots():
        missing = {name for name, value in snapshot.scalars().items() if value is None or not np.isfinite(value)}
        assert missing <= undefined(config), snapshot.step
    losses = logged(whole, "val/loss")
    assert losses[4] < losses[0]


@pytest.mark.parametrize("arm", [arm for arm, fields in ARMS.items() if "estimated" in fields.values()])
def test_running_moments_count_training_alone(configured, tmp_path, arm):
    """Neither validation nor snapshots are batches; the newborn's probe is one."""
    config = configured(arm, {})
    state = FolderCheckpointIO().load_checkpoint(run(config, tmp_path / "run").checkpoint(6))["state_dict"]
    blocks = config.model.attention.aggregation_blocks
    counts = {name: value.item() for name, value in state.items() if name.endswith("aggregate.rho.n_batches")}
    assert counts == {
        f"model.blocks.{block}.attn.aggregate.rho.n_batches": 1 + 6 * 2
        for block in (range(2) if blocks is None else blocks)
    }


def test_arms_have_one_report(configured, tmp_path):
    """Also those whose figures are null."""
    names = ["plain", *(next(arm for arm in ARMS if value in arm) for value in ("normaliser=sigmoid", "positions=t5"))]
    names += [arm for arm in ARMS if "zero=['embed']" in arm or "zero=['head']" in arm]
    assert len(names) == 5
    short = {"trainer.max_steps": 2, "snapshot.n_strangers": 1}
    runs = [run(configured(arm, short), tmp_path / f"arm-{i}") for i, arm in enumerate(names)]
    page = tmp_path / "report.html"
    build_report(runs, page)
    text = page.read_text(encoding="utf-8")
    assert text.endswith("</html>\n")
    assert all(done.path.name in text for done in runs)
    written = json.loads(json.dumps(summarise(runs), allow_nan=False))["runs"]
    assert [entry["name"] for entry in written] == [done.path.name for done in runs]
    assert written[-1]["rows"][0]["rank_persistence"] is None
