"""A user's own metric: measured like ours, and refused in one line where it cannot be."""

import inspect
import json
import random
import sys

import numpy as np
import pytest
import torch
from oracles import Seen
from torchmetrics import Metric

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.files import write_sealed_json
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.measurement import measure
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.measure.records import RunDir, Snapshot
from birthmark.metrics.quantity import Quantity
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 32, "max_seq_len": 12}
CONFIG = ModelConfig(**SIZES)
PROBE = random_probe(32, 9, 12, 0)
NORM = Quantity("mine", ("layer", "head"), definition="Mean norm of values.", scalar="mean")


class Mine(Metric):
    """Mean norm of a head's values."""

    quantities = (NORM,)

    def __init__(self, sizes):
        super().__init__()
        self.add_state("total", torch.zeros(sizes.n_layers, sizes.n_heads, dtype=torch.float64), "sum")
        self.add_state("n", torch.zeros(sizes.n_layers, 1), "sum")

    def attention(self, layer, attended):
        self.update(layer - 1, attended.v_BHTK)

    def update(self, layer, v_BHTK):
        self.total[layer] += v_BHTK.norm(dim=-1).sum((0, 2))
        self.n[layer] += v_BHTK.shape[0] * v_BHTK.shape[2]

    def compute(self):
        return {"mine": self.total / self.n}


def variant(base=Mine, **members):
    """A subclass with some members replaced."""
    return type("Variant", (base,), members)


def model(seed=0):
    return born(CONFIG, seed)


def taken(metric, measured=None, **more):
    return measure(measured or model(), PROBE, metrics=[metric], **{"batch_size": 4, **more})


@pytest.fixture(scope="module")
def expected():
    """Mean norms from whole tensors."""
    with torch.no_grad():
        model()(torch.from_numpy(PROBE), observer=(seen := Seen()))
    return torch.stack([a.v_BHTK.double().norm(dim=-1).mean((0, 2)) for a in seen.attended.values()]).numpy()


@pytest.mark.parametrize("batch_size", [2, 9])
def test_it_is_measured_beside_ours_and_changes_none_of_them(expected, batch_size):
    found = taken(Mine, batch_size=batch_size)
    np.testing.assert_allclose(found.arrays["mine"], expected, rtol=1e-6)
    assert found.scalars["mine"] == pytest.approx(expected.mean())
    alone = measure(model(), PROBE, batch_size=batch_size)
    assert list(found.scalars) == [*alone.scalars, "mine"]
    assert {name: found.scalars[name] for name in alone.scalars} == alone.scalars
    for name, array in alone.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)


def test_an_instance_begins_anew_at_every_measurement(expected):
    class Made(Mine):
        def __init__(self):
            super().__init__(type("Sizes", (), {"n_layers": 2, "n_heads": 4}))

    metric = Made()
    for _ in range(2):
        np.testing.assert_allclose(taken(metric).arrays["mine"], expected, rtol=1e-6)


@pytest.mark.parametrize("place", ["residual", "neurons", "logits"])
def test_every_place_can_be_read(place):
    """Shapes of what it is shown, against those that models/observe.py names."""
    seen = []

    def hook(self, *arguments):
        seen.append([a if isinstance(a, (str, int)) else tuple(a.shape) for a in arguments])
        self.update()

    members = {place: hook, "attention": None, "update": lambda self: None, "compute": lambda self: {"mine": 1.0}}
    members["quantities"] = (Quantity("mine", definition="One."),)
    assert taken(variant(**members), batch_size=9).scalars["mine"] == 1
    of_blocks = [[site, layer, (9, 12, 16)] for layer in (1, 2) for site in ("attention", "mlp")]
    expected = {"residual": [["embedding", 0, (9, 12, 16)], *of_blocks], "logits": [[(9, 32)]]}
    expected["neurons"] = [[layer, (9, 12, model().config.ff)] for layer in (1, 2)]
    assert seen == expected[place]


def test_sums_over_weights_are_there_without_weights():
    def attention(self, layer, attended):
        self.update(layer - 1, attended.sums.importance_2BHT[0, ..., :1, None])

    def compute(self):
        return {"mine": self.total / self.n}

    found = taken(variant(attention=attention, compute=compute), batch_size=4)
    np.testing.assert_allclose(found.arrays["mine"], found.arrays["importance"][..., 0], rtol=1e-5)


def test_one_layer_with_one_head_keeps_its_shape():
    """torchmetrics makes a scalar of a tensor of one element."""
    one = born(ModelConfig(d_model=8, n_layers=1, n_heads=1, vocab_size=32, max_seq_len=12), 0)
    found = measure(one, PROBE, metrics=[Mine])
    assert found.arrays["mine"].shape == (1, 1)
    assert found.scalars["mine"] == found.arrays["mine"][0, 0]


def test_a_snapshot_carries_the_declaration_of_every_probe_and_opens_without_the_module(tmp_path, monkeypatch):
    head = "import torch\nfrom torchmetrics import Metric\nfrom birthmark.metrics.quantity import Quantity\n"
    declared = "NORM = Quantity('mine', ('layer', 'head'), definition='Mine.', scalar='mean', section='my own')\n"
    (tmp_path / "script_of_a_user.py").write_text(head + declared + inspect.getsource(Mine))
    monkeypatch.chdir(tmp_path)
    config = SnapshotConfig(n_sequences=4, seq_len=8, metrics=["script_of_a_user:Mine"])
    recorder = SnapshotRecorder(tmp_path / "bias", config, probes={"text": PROBE})
    recorder.take(model(), 0)
    monkeypatch.delitem(sys.modules, "script_of_a_user")
    (tmp_path / "script_of_a_user.py").unlink()
    stored = Snapshot.read(RunDir(tmp_path / "bias").snapshot(0))
    mine = Quantity("mine", ("layer", "head"), definition="Mine.", scalar="mean", section="my own")
    assert stored.quantities["mine"] == mine
    for prefix, probe in (("", "bias"), ("text.", "bias_text")):
        array = stored.arrays[f"{prefix}mine"]
        assert array.shape == (2, 4)
        assert stored.scalars()[f"{probe}/mine"] == pytest.approx(array.mean())
    plain = SnapshotRecorder(tmp_path / "plain", SnapshotConfig(n_sequences=4, seq_len=8)).take(model(), 0)
    assert "quantities" not in plain.summary
    summary = tmp_path / "bias/snapshots/step-00000000/summary.json"
    changed = json.loads(summary.read_text().replace('"head"', '"width"'))
    write_sealed_json(summary, {name: value for name, value in changed.items() if name != "sha256"})
    with pytest.raises(RunError, match=r"summary\.json: damaged \(quantities: mine: axis 'width'"):
        Snapshot.read(summary.parent)


# ---------------------------------------------------------------- what is refused


def one_line(error):
    assert "\n" not in str(error.value)


SCALAR = Quantity("mine", definition="M.")


def gives(compute, declared=NORM):
    return variant(quantities=(declared,), compute=compute)


NOT_METRICS = {
    "no colon": ("torchmetrics", "has 'torchmetrics': give module:Class"),
    "no module": ("no_such_module:Mine", "no_such_module:Mine: cannot be imported .ModuleNotFoundError: No module"),
    "no class": ("torchmetrics:NoSuch", "torchmetrics:NoSuch: cannot be imported .AttributeError: "),
    "no metric": ("pathlib:Path", "pathlib:Path: is no torchmetrics.Metric"),
    "not declared": ("torchmetrics:MeanMetric", "torchmetrics:MeanMetric: declares no quantities"),
    "declared as text": (variant(quantities=("mine",)), "declares no quantities"),
    "impossible": (variant(quantities=(Quantity("mine", ("width",), definition="M."),)), "axis 'width'"),
    "no place": (variant(attention=None), "reads no place of a pass; give a method residual"),
    "our name": (variant(quantities=(Quantity("sink_mass", definition="M."),)), "'sink_mass' is that of a quantity of"),
}


@pytest.mark.parametrize("case", NOT_METRICS)
def test_what_is_no_metric_is_refused_before_anything_is_measured(case, tmp_path):
    metric, message = NOT_METRICS[case]
    with pytest.raises(UsageError, match=f"^snapshot.metrics .*{message}") as error:
        SnapshotRecorder(tmp_path, metrics=[metric])
    one_line(error)


def test_two_metrics_have_names_of_their_own(tmp_path):
    with pytest.raises(UsageError, match=r"the name 'mine' is that of a quantity of .*:Mine; give another"):
        SnapshotRecorder(tmp_path, metrics=[Mine, variant()])
    problems = SnapshotConfig(metrics=["a:B", "a:B", "c"]).problems()
    assert problems == ["snapshot.metrics has 'a:B' twice: give it once", "snapshot.metrics has 'c': give module:Class"]


def _fails(self, layer, attended):
    raise ValueError("two\nlines")


WRONG = {
    "raises at a place": (variant(attention=_fails), "attention raised ValueError: two lines"),
    "raises at the end": (gives(lambda m: 1 / 0), "compute raised ZeroDivisionError: division by zero"),
    "gives no names": (gives(lambda m: m.total), "compute gives Tensor; give a dict"),
    "another shape": (gives(lambda m: {"mine": m.total.T}), r"shape \[4, 2\]; its axes layer, head have \[2, 4\]"),
    "another dimension": (gives(lambda m: {"mine": m.total[0]}), r"mine has the shape \[4\]"),
    "an array for a scalar": (gives(lambda m: {"mine": m.total}, SCALAR), r"a scalar, and is an array \[2, 4\]"),
    "text": (gives(lambda m: {"mine": "much"}, SCALAR), "mine is of type <U4; give numbers"),
    "undeclared": (gives(lambda m: {"mine": m.total, "more": 1.0}), "gives 'more', which it does not declare"),
    "missing": (gives(lambda m: {}), "does not give 'mine', which it declares"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_goes_wrong_is_one_line_that_names_the_metric(case):
    metric, message = WRONG[case]
    with pytest.raises(RunError, match=f"^snapshot.metrics .*(Variant|Mine): .*{message}") as error:
        taken(metric)
    one_line(error)


def test_a_metric_that_cannot_be_made_is_named():
    with pytest.raises(UsageError, match=r"Variant: cannot be made \(TypeError: .*\)$"):
        taken(variant(__init__=lambda self: None))


def test_what_a_condition_excuses_may_be_missing():
    rare = variant(quantities=(NORM, Quantity("rare", definition="Rare.", when="it is there")))
    assert "rare" not in taken(rare).scalars


# ---------------------------------------------------------------- what must be left alone


def trained():
    made = model()
    made.train()
    made(torch.from_numpy(PROBE)).logsumexp(-1).mean().backward()
    return made


HARM = {
    "a parameter": (lambda m, a: m.embed.weight.add_(1), "changed embed.weight"),
    "a parameter, past the count": (lambda m, a: m.norm.gain.data.mul_(2), r"changed norm\.gain"),
    "a gradient": (lambda m, a: m.head.weight.grad.zero_(), "changed the gradient of head.weight"),
    "a gradient, past the count": (lambda m, a: m.norm.gain.grad.data.mul_(2), "changed the gradient of norm"),
    "all gradients": (lambda m, a: m.zero_grad(), "changed the gradient of "),
    "requires_grad": (lambda m, a: m.embed.weight.requires_grad_(False), "changed requires_grad of embed.weight"),
    "the mode": (lambda m, a: m.blocks[0].train(), r"changed the training mode of blocks\.0"),
    "hooks": (lambda m, a: m.norm.register_forward_hook(lambda *_: None), "changed the hooks of norm"),
    "torch's random state": (lambda m, a: torch.rand(1), "drew random numbers, .*torch's"),
    "numpy's random state": (lambda m, a: np.random.rand(), "drew random numbers, .*numpy's"),
    "Python's random state": (lambda m, a: random.random(), "drew random numbers, .*Python's"),
    "what it was shown": (lambda m, a: a.v_BHTK.mul_(2), "attention changed a tensor that it was shown"),
}  # fmt: skip


@pytest.mark.parametrize("case", HARM)
def test_a_metric_that_changes_the_model_or_its_training_is_named(case):
    harm, message = HARM[case]
    measured = trained()
    modes = [module.training for module in measured.modules()]
    with pytest.raises(RunError, match=f"^snapshot.metrics .*Variant: {message}") as error:
        taken(variant(attention=lambda self, layer, attended: harm(measured, attended)), measured)
    one_line(error)
    assert [module.training for module in measured.modules()] == modes


def test_a_metric_that_changes_nothing_leaves_no_trace():
    measured = trained()
    before = [(p.detach().clone(), p.grad.clone(), p._version, p.grad._version) for p in measured.parameters()]
    state = torch.get_rng_state()
    taken(Mine, measured)
    assert torch.equal(state, torch.get_rng_state())
    for (value, grad, *versions), p in zip(before, measured.parameters(), strict=True):
        assert torch.equal(value, p)
        assert torch.equal(grad, p.grad)
        assert versions == [p._version, p.grad._version]


# The class above, from its source: what a process is given by a file cannot be imported from this one.
SCRIPT = f"""
import json, sys
import torch
import torch.distributed as dist
from torchmetrics import Metric
from birthmark.data.probes import random_probe
from birthmark.errors import RunError
from birthmark.measure.measurement import measure
from birthmark.metrics.quantity import Quantity
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
NORM = Quantity("mine", ("layer", "head"), definition="Mean norm of values.", scalar="mean")

{inspect.getsource(Mine)}
class Fails(Mine):
    def attention(self, layer, attended):
        if rank == 1:
            raise ValueError("of rank 1")

model, probe = born(ModelConfig(**{SIZES}), 0), random_probe(32, 9, 12, 0)
results = {{"mine": measure(model, probe, batch_size=2, metrics=[Mine]).arrays["mine"].tolist()}}
try:
    measure(model, probe, metrics=[Fails])
except RunError as error:
    results["error"] = str(error)
with open(out, "w") as file:
    json.dump(results, file)
"""


def test_two_ranks_measure_it_together_and_fail_together(two_ranks, expected):
    a, b = (json.loads(file.read_text()) for file in two_ranks(SCRIPT, ".json"))
    assert a["mine"] == b["mine"]
    np.testing.assert_allclose(a["mine"], expected, rtol=1e-6)
    assert b["error"].endswith("Fails: attention raised ValueError: of rank 1")
    assert a["error"].endswith("Fails: failed on another rank")
