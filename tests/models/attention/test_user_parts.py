"""Parts of attention that are a class of the user's own, named by import path."""

import dataclasses
import sys

import pytest
import torch
from rich.console import Console

from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.exchange.conversion import config_from_json
from birthmark.models.exchange.conversion import family_of as written_as
from birthmark.models.init import parameter_roles
from birthmark.models.parameter_shapes import parameter_shapes
from birthmark.models.user_classes import name_user_code
from birthmark.models.user_parts import check_user_parts
from birthmark.trainer.config_file import read_config
from birthmark.trainer.run import pretrain
from birthmark.trainer.saved_config import write_config

CLASSES = """
import torch
from torch import nn

from birthmark.models.attention.aggregation import PlainAggregation
from birthmark.models.attention.attention import PlainOutput
from birthmark.models.attention.normalisers import Similarity, Softmax
from birthmark.models.attention.scores import ExtraKey
from birthmark.models.init import Constant
from birthmark.models.init import ParameterRole


class SquaredRelu(Similarity):
    def phi(self, scores):
        return scores.relu().square()


class Relu(Similarity):
    def phi(self, scores):
        return scores.relu()


class Failing(Similarity):
    def phi(self, scores):
        raise ValueError("two\\nlines")


class Silent(PlainAggregation):
    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(config.n_heads))


class Scaled(Silent):
    def __init__(self, config):
        super().__init__(config)
        self.parameter_roles = {"gain": ParameterRole.GAIN}

    def distributions(self, init):
        return {"gain": Constant(1.0)}

    def forward(self, weighted, v_BHSK):
        return weighted.o_BHTK * self.gain[:, None, None]


class Halved(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK / 2


class Broken(PlainOutput):
    def __init__(self, config):
        raise ValueError("two\\nlines")


class Buffered(PlainAggregation):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("slopes", torch.ones(config.n_heads, device="cpu"))


class Kept(PlainAggregation):
    def __init__(self, config):
        super().__init__(config)
        self.inner = nn.Identity()
        self.inner.table = torch.ones(config.n_heads)


class OneOfEachRow(Similarity):
    def phi(self, scores):
        return scores[..., :1]


class OfEachPosition(PlainAggregation):
    def forward(self, weighted, v_BHSK):
        return weighted.o_BHTK.transpose(1, 2)


class Forgetful(PlainAggregation):
    def forward(self, weighted, v_BHSK):
        weighted.o_BHTK * 2


class Averaged(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK.mean(2, keepdim=True)


class Bare(Softmax):
    def forward(self, scores, v, extra, needs_weights, needs_squares):
        return v


class Narrowed(Softmax):
    def forward(self, *given):
        weighted = super().forward(*given)
        weighted.o_BHTK = weighted.o_BHTK[..., :1]
        return weighted


class OverAllKeys(Similarity):
    def phi(self, scores):
        return scores.softmax(-1)


class LessTheMean(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK - o_BHTK.mean(2, keepdim=True)


class LessTheMeanSoFar(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK - o_BHTK.cumsum(2) / torch.arange(1, o_BHTK.shape[2] + 1)[:, None]


class LessTheMeanValue(PlainAggregation):
    def forward(self, weighted, v_BHSK):
        return weighted.o_BHTK - v_BHSK.mean(2, keepdim=True)


class LessTheBatch(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK - o_BHTK.mean(0)


class Reversed(Scaled):
    def distributions(self, init):
        return {"gain": Constant(0.0)}

    def forward(self, weighted, v_BHSK):
        return weighted.o_BHTK + self.gain[:, None, None] * weighted.o_BHTK.flip(2)


class FarAhead(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK + o_BHTK.roll(-20, 2)


class BesideAHugeChannel(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return torch.cat([torch.full_like(o_BHTK[..., :1], 1e10), (o_BHTK + o_BHTK.flip(2))[..., 1:]], -1)


class Dropping(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return nn.functional.dropout(o_BHTK)


class WholeSequences(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK * torch.linspace(1, 2, 40)[:, None]


class Wide(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK.double()


class Doubling(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        return o_BHTK.mul_(2)


class DoublingInput(PlainOutput):
    def forward(self, o_BHTK, x_BTD):
        x_BTD.mul_(2)
        return o_BHTK


class RunningMean(PlainOutput):
    mean = 0.0

    def forward(self, o_BHTK, x_BTD):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * float(o_BHTK.mean())
        return o_BHTK - self.mean


class Counting(RunningMean):
    def forward(self, o_BHTK, x_BTD):
        self.mean += 1.0
        return o_BHTK / self.mean


class KeyOfScore(Softmax):
    shape = (3, 2, 12, 1)

    def extra_keys(self, scores):
        return [ExtraKey(torch.full(self.shape, 0.5))]


class KeyPerHead(KeyOfScore):
    shape = (2,)


class ValueForAll(KeyOfScore):
    def extra_keys(self, scores):
        return [ExtraKey(torch.zeros(3, 2, 12, 1), torch.ones(8))]


class NoList(KeyOfScore):
    def extra_keys(self, scores):
        return super().extra_keys(scores)[0]


class BesideOneKey(Similarity):
    def __init__(self, config):
        super().__init__(config)
        self.normalise = True

    def phi(self, scores):
        return scores.exp()

    def extra_keys(self, scores):
        return KeyOfScore.extra_keys(KeyOfScore, scores)


class Numbered(Scaled):
    def distributions(self, init):
        return {"gain": 1.0}


class Misnamed(Scaled):
    def __init__(self, config):
        super().__init__(config)
        self.parameter_roles = {"gain": "gains"}
"""
SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 24, "max_seq_len": 12}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the classes in ``my_arms.py``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "my_arms"})
    (tmp_path / "my_arms.py").write_text(CLASSES)
    return tmp_path


def model(**attention):
    return ModelConfig(**SMALL, attention=AttentionConfig(**attention))


def test_a_class_of_ones_own_does_what_the_same_class_of_ours_does(here):
    tokens = torch.randint(0, 24, (3, 12), generator=torch.Generator().manual_seed(0))
    own, ours = (born(model(normaliser=name), 3) for name in ("my_arms:Relu", "relu"))
    assert torch.equal(own(tokens), ours(tokens))
    squared = born(model(normaliser="my_arms:SquaredRelu"), 3)
    assert not torch.equal(squared(tokens), ours(tokens))


def test_it_is_born_paired_and_counted(here):
    config = model(aggregation="my_arms:Scaled", aggregation_blocks=[1], gate="my_arms:Halved")
    own, plain = born(config, 3), born(model(), 3).state_dict()
    added = {name: value for name, value in own.state_dict().items() if name not in plain}
    assert {name: value.tolist() for name, value in added.items()} == {"blocks.1.attn.aggregate.gain": [1.0, 1.0]}
    assert all(torch.equal(own.state_dict()[name], value) for name, value in plain.items())
    assert list(parameter_shapes(config)) == [(name, tuple(x.shape)) for name, x in own.named_parameters()]
    assert parameter_roles(own)["blocks.1.attn.aggregate.gain"] == "gain"


def test_a_run_records_it_measures_it_and_resumes(here, tiny):
    arm = {"model.attention.normaliser": "my_arms:SquaredRelu"}
    config = tiny(arm | {"trainer.max_steps": 2, "snapshot.n_strangers": 1})
    run, quiet = RunDir(here / "run"), Console(quiet=True)
    pretrain(config, run, console=quiet)
    saved = read_config(run.config)
    assert saved.model.attention.normaliser == "my_arms:SquaredRelu"
    assert {"sink_mass", "sink_mass_normalised", "n_eff"} <= run.snapshots()[-1].bias.keys()
    longer = dataclasses.replace(saved, trainer=dataclasses.replace(saved.trainer, max_steps=4))
    assert pretrain(longer, run, resume=True, console=quiet).step == 4
    assert [line["step"] for line in read_metrics(run.metrics) if "train/loss" in line] == [1, 2, 3, 4]


REFUSED = {
    "a typing mistake": ({"normaliser": "sofmax"}, "normaliser is 'sofmax': give softmax, softmax_off_by_one, softmax"),
    "no such name of ours": ({"gate": "heads"}, "gate is 'heads': give none, head, channel, or a class of your own as"),
    "no module": ({"normaliser": "no_such:A"}, "no_such:A: cannot be imported (ModuleNotFoundError: No module named"),
    "no class": ({"normaliser": "my_arms:A"}, "my_arms:A: cannot be imported (AttributeError: module 'my_arms' has no"),
    "another class": ({"gate": "collections:OrderedDict"}, "derive it from birthmark.models.attention.attention.Plain"),
    "a part of another kind": ({"normaliser": "my_arms:Scaled"}, "derive it from birthmark.models.attention.normalise"),
    "a function": ({"normaliser": "os:getcwd"}, "os:getcwd: derive it from birthmark.models.attention.normalisers.Sof"),
    "one that raises": ({"gate": "my_arms:Broken"}, "my_arms:Broken: cannot be made (ValueError: two lines)"),
    "no start": ({"aggregation": "my_arms:Silent"}, "Silent owns parameters ['gain'] but does not state their distrib"),
    "a buffer": ({"aggregation": "my_arms:Buffered"}, "my_arms:Buffered: keeps the tensor slopes, which has no values"),
    "a tensor": ({"aggregation": "my_arms:Kept"}, "my_arms:Kept: keeps the tensor inner.table, which has no values"),
    "no distribution": ({"aggregation": "my_arms:Numbered"}, "Numbered states 1.0 as the distribution of gain; give"),
    "no role": ({"aggregation": "my_arms:Misnamed"}, "cannot be made (ValueError: 'gains' is not a valid Parameter"),
    "rows unknown": (
        {"normaliser": "my_arms:Relu", "aggregation": "calibrated"},
        "calibrated needs rows of weights that sum to 1 at most, which is not known of model.attention.normaliser my_a",
    ),
}


@pytest.mark.parametrize(("attention", "words"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_a_part_is_one_line(attention, words, here):
    with pytest.raises(UsageError) as refused, torch.device("meta"):
        Decoder(model(**attention))
    assert words in str(refused.value)
    assert str(refused.value).startswith("model.attention.")
    assert "\n" not in str(refused.value)


#: With 3 sequences of 12 tokens, 2 heads of 8 channels. Those of one channel, key or position would broadcast.
MISSHAPEN = {
    "one key": ("normaliser", "OneOfEachRow: phi gives the shape [3, 2, 12, 1]; give a tensor of the shape ["),
    "one position": ("gate", "Averaged: forward gives the shape [3, 2, 1, 8]; give a tensor of the shape ["),
    "one channel": (
        "normaliser",
        "Narrowed: the WeightedSum gives the shape [3, 2, 12, 1]; give a tensor of the shape [",
    ),
    "other axes": (
        "aggregation",
        "OfEachPosition: forward gives the shape [3, 12, 2, 8]; give a tensor of the shape [",
    ),
    "nothing": ("aggregation", "Forgetful: forward gives NoneType; give a tensor of the shape [3, 2, 12, 8]"),
    "a tensor": ("normaliser", "Bare: forward gives Tensor; give a WeightedSum, as super().forward does"),
    "a score for each head": ("normaliser", "KeyPerHead: a score of extra_keys gives the shape [2]; give a tensor of"),
    "a value for all": ("normaliser", "ValueForAll: a value of extra_keys gives the shape [8]; give a tensor of the s"),
    "one key in no list": ("normaliser", "NoList: extra_keys gives no list of ExtraKey; give one, [] for none"),
}


@pytest.mark.parametrize(("part", "words"), MISSHAPEN.values(), ids=list(MISSHAPEN))
def test_a_part_that_gives_another_shape_is_refused(part, words, here):
    config = model(**{part: f"my_arms:{words.partition(':')[0]}"})
    with pytest.raises(UsageError) as refused:
        born(config, 0)(torch.zeros(3, 12, dtype=torch.long))
    assert str(refused.value).startswith(f"model.attention.{part} my_arms:{words}")


def test_rows_that_sum_to_one_with_a_key_of_ones_own(here):
    # exp(s) over its sum, with one more key: the softmax with that key.
    alone, together = (born(model(normaliser=f"my_arms:{name}"), 3) for name in ("BesideOneKey", "KeyOfScore"))
    tokens = torch.randint(0, 24, (3, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(alone(tokens), together(tokens))


LATER, OTHER = "its output at a position changes with a later one", "its output for a sequence changes with another one"
KEPT = "its output for the same input and parameters changes from call to call, so that no resumed run goes on as it"
IN_PLACE = "changes its input in place, which others read; give a new tensor"
#: Parts that read what they may not, and at first sight similar ones.
LOOKING = {
    "normalised over all keys": ({"normaliser": "my_arms:OverAllKeys"}, LATER),
    "the mean of all outputs": ({"gate": "my_arms:LessTheMean"}, LATER),
    "of all values, in one block": ({"aggregation": "my_arms:LessTheMeanValue", "aggregation_blocks": [1]}, LATER),
    "behind a prefix": ({"gate": "my_arms:LessTheMean", "prefix": 4}, LATER),
    "once it has trained": ({"aggregation": "my_arms:Reversed"}, LATER),
    "other sequences": ({"gate": "my_arms:LessTheBatch"}, OTHER),
    "beside a huge channel": ({"gate": "my_arms:BesideAHugeChannel"}, LATER),
    "a running mean": ({"gate": "my_arms:RunningMean"}, KEPT),
    "a count of calls": ({"gate": "my_arms:Counting"}, KEPT),
    "its input in place": ({"gate": "my_arms:Doubling", "aggregation": "headnorm"}, IN_PLACE),
    "the attention's input in place": ({"gate": "my_arms:DoublingInput"}, IN_PLACE),
    "float64": ({"gate": "my_arms:Wide"}, "gives float64 for float32, and the model would go on in it; give the type"),
    "random numbers": ({"gate": "my_arms:Dropping"}, None),
    "the mean so far": ({"gate": "my_arms:LessTheMeanSoFar"}, None),
    "each score": ({"normaliser": "my_arms:SquaredRelu", "prefix": 4}, None),
    "with moments": (
        {
            "gate": "my_arms:Halved",
            "aggregation": "calibrated",
            "calibration": CalibrationConfig(correlation="estimated"),
        },
        None,
    ),
}


@pytest.mark.parametrize(("attention", "words"), LOOKING.values(), ids=list(LOOKING))
def test_a_part_that_reads_later_tokens_or_other_sequences_is_refused(attention, words, here):
    part, name = next(iter(attention.items()))
    name_user_code(name)
    if words is None:
        check_user_parts(model(**attention))
        return
    with pytest.raises(UsageError) as refused:
        check_user_parts(model(**attention))
    assert str(refused.value).startswith(f"model.attention.{part} {name}: {words}")


def test_a_part_is_tried_on_sequences_as_long_as_the_runs(here):
    name_user_code("my_arms:FarAhead my_arms:WholeSequences")
    state = torch.get_rng_state()
    check_user_parts(dataclasses.replace(model(gate="my_arms:WholeSequences"), max_seq_len=40))
    with pytest.raises(UsageError, match=LATER):
        check_user_parts(dataclasses.replace(model(gate="my_arms:FarAhead"), max_seq_len=40))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("gate", "words"), [("Broken", "cannot be made"), ("LessTheMean", "read no position after")])
def test_a_run_ends_before_its_data_are_prepared(gate, words, here, tiny):
    config = tiny({"model.attention.gate": f"my_arms:{gate}", "data.path": ".", "data.cache_dir": "cache"})
    with pytest.raises(UsageError, match=words):
        pretrain(config, RunDir(here / "run"), console=Console(quiet=True))
    assert not (here / "run").exists()
    assert not (here / "cache").exists()


def test_a_pass_that_raises_names_the_class(here, tiny, capsys):
    # The module holds another class of the run, imported after it.
    parts = {"normaliser": "my_arms:Failing", "aggregation": "my_arms:Scaled", "gate": "my_arms:Halved"}
    write_config(tiny({f"model.attention.{part}": name for part, name in parts.items()}), here / "run.yaml")
    assert main(["pretrain", "run.yaml", "--run_dir", "run"]) == 1
    said = capsys.readouterr().err
    assert "error: model.attention.normaliser my_arms:Failing raised ValueError: two lines; --debug shows where" in said


def test_a_config_is_read_without_importing_anything(here):
    (here / "trap.py").write_text("raise SystemExit('imported')")
    (here / "run.yaml").write_text("model: {attention: {normaliser: 'trap:A'}}")
    assert read_config(here / "run.yaml").model.attention.user_parts == {"normaliser": "trap:A"}


def test_no_code_is_taken_from_a_runs_folder(here, monkeypatch):
    run = here / "theirs"
    run.mkdir()
    (run / "birth.json").write_text("{}")
    (run / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(run)
    with pytest.raises(UsageError, match=r"the module lies in the run's folder .*theirs, and no code is taken from"):
        Decoder(model(normaliser="trap:A"))


@pytest.mark.parametrize("key", ["normaliser", "attention.normaliser", "aggregation", "hidden_act"])
def test_a_config_of_transformers_names_no_code(key, here, their_config):
    (here / "trap.py").write_text("raise SystemExit('imported')")
    content = their_config("llama").to_dict() | {key: "trap:A"}
    try:
        found = config_from_json(content)
    except UsageError:
        assert key == "hidden_act"
    else:
        assert found.attention.user_parts == {}


def test_it_has_no_counterpart_in_transformers(here):
    with pytest.raises(UsageError, match=r"model\.attention\.normaliser my_arms:Relu has no counterpart"):
        written_as(model(normaliser="my_arms:Relu"))
