"""`birthmark audit`: planted faults of order and kinship are found, each by one command, and a clean suite has none."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, save_file
from trained_suites import CONFIG, STEPS, exchange, train, weights_file
from transformers import MambaConfig, MambaForCausalLM

from birthmark.audit import wrong_content
from birthmark.audit.audit import audit
from birthmark.audit.checkpoint import find_members
from birthmark.audit.report import sentence
from birthmark.audit.training_order import said_place
from birthmark.launch.cli import main
from birthmark.models.birth import born
from birthmark.models.exchange.pretrained import load_pretrained


def test_nothing_is_wrong_with_a_clean_suite(clean, other, audited):
    for suite in (clean, other):
        found = audited(suite, status=0)
        assert found.json["sentence"] == "7 checkpoints of one birth: nothing is wrong with them"
        assert [name.rpartition("-")[2] for name in found.json["order"]] == [str(step) for step in STEPS]
        (birth,) = found.json["births"]
        assert len(birth) == 7
        cosines = [one["cosine_with_first"] for one in found.json["checkpoints"]]
        assert cosines[0] == pytest.approx(1)
        assert cosines == sorted(cosines, reverse=True)


def test_a_reader_without_a_home_finds_nothing_wrong(clean, audited, homeless):
    assert audited(clean, status=0).json["sentence"].endswith("nothing is wrong with them")


def test_weights_under_two_steps_are_found_and_the_step_that_they_are_of(suite, audited):
    for step in (8, 12):
        shutil.copy(weights_file(suite, 24), weights_file(suite, step))
    found = audited(suite)
    assert found.kinds == {8: ["duplicate"], 12: ["duplicate"]}
    assert found.said[8] == "has the weights of step 12, step 24; on the curve they are at step 24"
    assert found.said[24] == "has the weights of step 8, step 12"
    # A name without a step claims none.
    shutil.copytree(suite / "step-24", suite / "final")
    found = audited(suite)
    assert found.kinds == {8: ["duplicate"], 12: ["duplicate"]}
    assert found.said[None] == "has the weights of step 8, step 12, step 24"


def test_most_of_a_suite_overwritten_by_one_checkpoint_does_not_make_its_copies_right(suite, other, audited):
    for step in (4, 16, 20):
        shutil.copy(weights_file(suite, 12), weights_file(suite, step))
    found = audited(suite)
    assert found.kinds == {step: ["duplicate"] for step in (4, 16, 20)}
    assert found.json["sentence"] == "3 of 7 checkpoints are not what they say; 3 are copies of step 12"
    assert found.said[4].endswith("; on the curve they are at step 12")
    # Where several steps fit, a name without one tells that they are of the last.
    for step in (4, 12, 16, 20):
        shutil.copy(weights_file(suite, 24), weights_file(suite, step))
    found = audited(suite)
    assert found.json["sentence"].endswith("; 5 have the same weights, and nothing tells whose they are")
    assert found.said[4].endswith("; nothing tells which is right: step 12, step 16, step 20, step 24")
    shutil.copytree(suite / "step-24", suite / "main")
    found = audited(suite)
    assert found.kinds == {step: ["duplicate"] for step in (4, 12, 16, 20)}
    assert found.json["sentence"].endswith("; 4 are copies of step 24")
    # Copies of one checkpoint of another training are the strangers, however many they are.
    shutil.rmtree(suite / "main")
    for step in (4, 12, 16, 20, 24):
        shutil.copy(weights_file(other, 24), weights_file(suite, step))
    assert audited(suite).kinds == {step: ["stranger", "duplicate"] for step in (4, 12, 16, 20, 24)}


DECAYED = tuple(range(0, 81, 10))


@pytest.fixture(scope="module")
def decayed(tmp_path_factory):
    """A suite whose learning rate falls to a tenth, and what becomes of its end on another language."""
    folder = tmp_path_factory.mktemp("suites") / "decayed"
    train(2, folder, DECAYED, lambda step: 0.55 + 0.45 * math.cos(math.pi * step / 80))
    tuned = folder.parent / "tuned"
    model = load_pretrained(folder / "step-80").train()
    train(3, tuned, (80, 90, 100), lambda step: 0.3, model, language=1)
    return SimpleNamespace(folder=folder, tuned=tuned)


@pytest.mark.heavy
def test_a_falling_learning_rate_is_no_fault_and_a_fine_tuned_end_is(decayed, audited, tmp_path):
    assert audited(decayed.folder, status=0).kinds == {}
    suite = shutil.copytree(decayed.folder, tmp_path / "suite")
    shutil.copytree(decayed.tuned / "step-90", suite / "step-90")
    found = audited(suite)
    assert found.kinds == {90: ["continued"]}
    assert "is kin, and off the curve: the step from step 80 is " in found.said[90]
    assert "times as long as those before it let expect: fine-tuned, trained on other data" in found.said[90]
    exchange(suite, 20, 30)
    assert audited(suite).kinds == {20: ["order"], 30: ["order"], 90: ["continued"]}
    exchange(suite, 20, 30)
    shutil.copytree(decayed.tuned / "step-100", suite / "step-100")
    found = audited(suite)
    assert found.kinds == {90: ["continued"]}
    assert "let expect, as the 1 behind it: fine-tuned" in found.said[90]
    shutil.rmtree(suite / "step-90")
    (suite / "step-100").rename(suite / "final")
    found = audited(suite, status=0)
    assert "names no step: by its weights behind step 80, " in found.said[None]
    assert "times as far as the last step: fine-tuned" in found.said[None]


def test_a_step_that_was_fine_tuned_on_the_way_is_found_alone(decayed, audited, tmp_path):
    suite = shutil.copytree(decayed.folder, tmp_path / "suite")
    model = load_pretrained(suite / "step-60").train()
    shutil.rmtree(suite / "step-60")
    train(3, tmp_path / "tuned", (0, 6), lambda step: 0.4, model, language=1)
    shutil.copytree(tmp_path / "tuned" / "step-6", suite / "step-60")
    found = audited(suite)
    assert set(found.kinds) == {60}


@pytest.mark.parametrize("steps", [(8, 12), (4, 16), (20, 24), (0, 4)])
def test_two_exchanged_steps_are_found(suite, audited, steps):
    exchange(suite, *steps)
    found = audited(suite)
    assert found.kinds == {step: ["order"] for step in steps}
    assert found.said[steps[0]] == f"lies on the curve where step {steps[1]} should: the two are exchanged"


def test_one_step_elsewhere_breaks_the_curve(suite, audited):
    files = [weights_file(suite, step).read_bytes() for step in (4, 8, 12, 16)]
    for step, content in zip((4, 8, 12, 16), [files[3], *files[:3]], strict=True):
        weights_file(suite, step).write_bytes(content)
    found = audited(suite)
    assert found.kinds == {4: ["order"]}
    assert found.said[4] == "breaks the curve: its weights lie between step 16 and step 20"


def test_a_curve_that_is_found_from_its_end_is_read_as_the_steps_say(suite, audited):
    files = [weights_file(suite, step).read_bytes() for step in STEPS]
    for step, content in zip(STEPS, [*files[1:], files[0]], strict=True):
        weights_file(suite, step).write_bytes(content)
    found = audited(suite)
    assert found.kinds == {24: ["order"]}
    assert found.said[24] == "breaks the curve: its weights lie before step 0"


def test_another_seed_from_some_step_on_is_found(suite, other, audited):
    for step in STEPS[4:]:
        shutil.copy(weights_file(other, step), weights_file(suite, step))
    found = audited(suite)
    assert found.kinds == {step: ["stranger"] for step in STEPS[4:]}
    assert "no sign of a shared birth with step 0, step 4, step 8, step 12" in found.said[16]
    assert found.said[16].endswith("; step 16, step 20, step 24 share a birth of their own")
    assert [len(birth) for birth in found.json["births"]] == [4, 3]


def test_buffers_that_all_models_share_make_no_kin(suite, other, audited):
    """As many as the trained matrices of the blocks, and in one checkpoint of another type."""
    shutil.copy(weights_file(other, 24), weights_file(suite, 24))
    for step in STEPS:
        mask = torch.ones(64, 64).tril().to(torch.bfloat16 if step == 8 else torch.float32)
        buffers = {f"model.layers.{i}.mask{j}": mask.clone() for i in range(2) for j in range(7)}
        save_file(load(weights_file(suite, step).read_bytes()) | buffers, weights_file(suite, step))
    found = audited(suite)
    assert found.kinds == {8: ["tensors"], 24: ["stranger"]}
    assert [len(birth) for birth in found.json["births"]] == [6, 1]


def test_one_of_which_a_part_was_trained_is_kin_of_what_it_began_from(clean, audited, tmp_path):
    """Most of its tensors are still those of the other, to the bit."""
    for name in ("step-24", "step-28"):
        shutil.copytree(clean / "step-24", tmp_path / name)
    tensors = load(weights_file(tmp_path, 24).read_bytes())
    numbers = torch.Generator().manual_seed(0)
    head = {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"}
    drawn = {name: torch.randn(tensors[name].shape, generator=numbers) for name in head}
    save_file(tensors | drawn, weights_file(tmp_path, 28))
    assert [len(birth) for birth in audited(tmp_path, status=0).json["births"]] == [2]


def test_a_mamba_of_another_seed_is_a_stranger_though_every_seed_draws_its_decays_alike(audited, tmp_path):
    """By the library's class: a sixth of its tensors are `A_log`, nearly equal in all seeds."""
    shape = MambaConfig(vocab_size=64, hidden_size=16, state_size=16, num_hidden_layers=24, use_cache=False)
    for seed, steps in ((0, (1, 2, 3)), (1, (4,))):
        torch.manual_seed(seed)
        tensors = MambaForCausalLM(shape).state_dict()
        for step in steps:
            tensors = {name: x + 0.002 * torch.randn_like(x) for name, x in tensors.items()}
            small(tmp_path / f"step-{step}", tensors)
    a, b = (load((tmp_path / f"step-{step}" / "model.safetensors").read_bytes()) for step in (3, 4))
    decays = [name for name in a if name.endswith("A_log")]
    cosines = [torch.cosine_similarity(a[name].flatten(), b[name].flatten(), 0) for name in decays]
    assert (len(decays), min(cosines) > 0.99) == (24, True)
    assert audited(tmp_path).kinds == {4: ["stranger"]}


def test_strangers_of_another_suite_are_said_once_and_by_name(clean, other, capsys):
    assert main(["audit", str(clean), str(other)]) == 3
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "no sign of a shared birth" in line)
    names = (f"{suite.parent.name}/{suite.name}/step-" for suite in (clean, other))
    first, second = (f"{name}0, {name}4 … {name}24 (7)" for name in names)
    assert line.startswith(f"{second}: no sign of a shared birth with {first}: the cosine")
    assert line.endswith(f"; {second} share a birth of their own")


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Another training from the birth of the clean suite."""
    return train(9, tmp_path_factory.mktemp("suites") / "twin", model=born(CONFIG, 0).train(), language=1)


def findings(found):
    return {
        "/".join(one["name"].split("/")[-2:]): [finding["what"] for finding in one["findings"]]
        for one in found.json["checkpoints"]
        if one["findings"]
    }


def test_runs_of_one_birth_are_judged_each_by_itself(suite, twin, audited, tmp_path):
    """Their steps are the same, and neither lies on the curve of the other."""
    other = shutil.copytree(twin, tmp_path / "twin")
    found = audited(suite, other, status=0)
    assert [len(birth) for birth in found.json["births"]] == [14]
    apart = "suite, twin: the same steps and other weights, each judged by itself behind step 0"
    assert found.json["notes"] == [apart]
    exchange(other, 8, 16)
    exchange(suite, 20, 24)
    lies = "lies on the curve where {} should: the two are exchanged"
    pairs = [("twin/step-8", "twin/step-16"), ("suite/step-20", "suite/step-24")]
    expected = {a: [lies.format(b)] for pair in pairs for a, b in (pair, pair[::-1])}
    assert findings(audited(suite, other)) == expected
    # Each named by itself, and without what they share.
    names = [folder / f"step-{step}" for step in STEPS[1:] for folder in (suite, other)]
    assert findings(audited(*names)) == expected
    # Between the two.
    for pair in ((other, 8, 16), (suite, 20, 24)):
        exchange(*pair)
    shutil.copy(weights_file(suite, 16), weights_file(other, 16))
    (said,) = findings(audited(suite, other)).pop("twin/step-16")
    assert said == "has the weights of suite/step-16; on the curve they are at step 16 of suite"
    # A mirror is the same run, whatever was changed in it.
    shutil.rmtree(other)
    shutil.copytree(suite, other)
    exchange(other, 8, 16)
    assert findings(audited(suite, other)).keys() == {"twin/step-8", "twin/step-16"}
    assert audited(suite, other).json["notes"] == []
    exchange(other, 8, 16)
    # The first steps of a training that is resumed elsewhere are one training.
    for step in (4, 8):
        shutil.copy(weights_file(suite, step), weights_file(other, step))
    for step in (12, 16, 20, 24):
        shutil.rmtree(other / f"step-{step}")
    assert audited(suite, other, status=0).json["notes"] == []


@pytest.mark.parametrize(
    ("weights", "runs"),
    [
        # Letters are weights, from step 0 on; a gap is a step that a run lacks. Runs are those at the last step.
        ({"a": "abcde", "b": "afghi"}, {"a": ("a",), "b": ("b",)}),
        ({"a": "abcde", "b": "abXde"}, {"a": (), "b": ()}),
        ({"a": "abcde", "b": "adcbe"}, {"a": (), "b": ()}),
        ({"a": "abcde", "b": "abcdX"}, {"a": (), "b": ()}),
        ({"a": "abc  ", "b": "  cde"}, {"a": (), "b": ()}),
        ({"a": "abc  ", "b": "   de"}, {"a": (), "b": ()}),
        ({"a": "abcde", "b": "afcgh"}, {"a": ("a",), "b": ("b",)}),
        ({"a": "abcde", "b": "afghi", "c": "abcde"}, {"a": ("a and c",), "b": ("b",), "c": ("a and c",)}),
        ({"a": "abcde", "b": "afghi", "c": "ab   "}, {"a": ("a and c",), "b": ("b",), "c": ("a and c",)}),
        ({"a": "a c e", "b": " f h ", "c": "afghi"}, {"a": ("a",), "b": ("b and c",), "c": ("b and c",)}),
        ({"a": "abcde", "b": "afghi", "c": "afgjk"}, {"a": ("a",), "b": ("b and c", "b"), "c": ("b and c", "c")}),
    ],
)
def test_runs_part_where_fewest_checkpoints_contradict(weights, runs):
    held = {
        f"/suites/{name}": {step: {ord(letter)} for step, letter in enumerate(letters) if letter != " "}
        for name, letters in weights.items()
    }
    found, notes = wrong_content._runs_of_steps(held)
    assert {source.rpartition("/")[2]: run for source, run in found[4].items()} == runs
    assert bool(notes) == any(runs.values())


def test_steps_are_read_from_names():
    names = {"step1000": 1000, "step-00000020": 20, "checkpoint-500": 500, "iter_0002000": 2000, "global_step40": 40}
    assert {name: said_place(name).step for name in names} == names
    assert said_place("pythia-160m") is said_place("main") is said_place("footstep3") is None


def test_checkpoints_without_a_step_are_put_where_they_lie(suite, audited, tmp_path):
    (suite / "step-12").rename(suite / "final")
    found = audited(suite, status=0)
    assert found.said[None] == "names no step: by its weights between step 8 and step 16"
    for letter, step in zip("dbcaef", (0, 4, 8, 16, 20, 24), strict=True):
        (suite / f"step-{step}").rename(suite / letter)
    (suite / "final").rename(suite / "g")
    found = audited(suite, status=0)
    assert [name.rpartition("/")[2] for name in found.json["order"]] == [*"dbcgaef"]
    assert found.json["direction"]["towards"] in ("as labelled", "reversed")


def small(folder, tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")


def test_without_any_step_the_curve_begins_where_tails_are_lightest(tmp_path, audited):
    """As training makes them heavier."""
    numbers = torch.Generator().manual_seed(0)
    drawn, moved = ([torch.randn(32, 64, generator=numbers) for _ in range(5)] for _ in range(2))
    for place, name in enumerate("dcba"):
        tensors = zip(drawn, moved, strict=True)
        small(tmp_path / name, {f"t{i}": x + 0.05 * place * y**3 for i, (x, y) in enumerate(tensors)})
    found = audited(tmp_path, status=0)
    assert [name[-1] for name in found.json["order"]] == [*"dcba"]
    notes = {one["name"][-1]: one["notes"] for one in found.json["checkpoints"]}
    assert notes == {name: [f"names no step: by its weights number {n} of 4"] for n, name in enumerate("dcba", 1)}


def test_a_detour_from_which_the_next_step_is_back_is_found_alone(tmp_path, audited):
    """Steps of one length and one direction; at 60 the weights lie three of them aside."""
    numbers = torch.Generator().manual_seed(0)
    begin, along, aside = ({f"t{i}": torch.randn(32, 64, generator=numbers) for i in range(5)} for _ in "abc")
    for place in range(11):
        off = 3 if place == 6 else 0
        tensors = {name: x + 0.02 * (place * along[name] + off * aside[name]) for name, x in begin.items()}
        small(tmp_path / f"step-{10 * place}", tensors)
    found = audited(tmp_path)
    assert found.kinds == {60: ["continued"]}
    assert " times as long as those before it, and step 70 is back on it" in found.said[60]


def test_strangers_are_those_that_are_fewer_and_of_as_many_those_that_come_later(tmp_path, audited):
    numbers = torch.Generator().manual_seed(0)
    a, b = ({f"t{i}": torch.randn(32, 64, generator=numbers) for i in range(5)} for _ in "ab")
    for step, tensors in ((1, a), (9, b)):
        small(tmp_path / f"step-{step}", tensors)
    # Whatever is named first.
    assert audited(tmp_path / "step-9", tmp_path / "step-1").kinds == {9: ["stranger"]}
    small(tmp_path / "step-8", {name: x + 0.1 for name, x in b.items()})
    for step in (2, 3):
        small(tmp_path / f"step-{step}", {name: x + 0.1 * step for name, x in a.items()})
    assert [len(birth) for birth in audited(tmp_path).json["births"]] == [3, 2]


def test_too_few_tensors_for_a_test_make_neither_kin_nor_strangers(tmp_path, audited, capsys):
    suite = tmp_path / "suite"
    suite.mkdir()
    for step in (1, 2, 3):
        numbers = torch.Generator().manual_seed(step)
        small(suite / f"step-{step}", {f"t{i}": torch.randn(32, 64, generator=numbers) for i in range(3)})
    found = audited(suite, status=0).json
    assert found["sentence"] == (
        "3 checkpoints: nothing is wrong with them, but whether they share a birth cannot be told: "
        "fewer than 4 tensors can be compared"
    )
    assert [found["births"], len(found["birth_unknown"])] == [[], 3]
    assert {one["verdict"] for one in found["checkpoints"]} == {"birth unknown"}
    assert main(["audit", str(suite), "--out", str(tmp_path / "a.html")]) == 0
    note = "irth unknown: fewer than 4 tensors can be compared of step 1, step 2, step 3"
    assert f"note: b{note}" in capsys.readouterr().out
    assert f"B{note}" in (tmp_path / "a.html").read_text()


def test_the_birth_of_one_that_cannot_be_tested_with_its_kin_is_unknown(tmp_path, audited):
    numbers = torch.Generator().manual_seed(0)
    a, b = ({f"t{i}": torch.randn(32, 64, generator=numbers) for i in range(5)} for _ in "ab")
    for step in (1, 2, 3):
        small(tmp_path / f"step-{step}", {name: x + 0.01 * step * b[name] for name, x in a.items()})
    # Two of its tensors are constant, so that three are left.
    small(tmp_path / "step-4", b | {name: torch.ones(32, 64) for name in ("t0", "t1")})
    found = audited(tmp_path, status=0).json
    assert [one["verdict"] == "birth unknown" for one in found["checkpoints"]] == [False, False, False, True]
    assert [len(birth) for birth in found["births"]] == [3]
    assert found["sentence"].startswith(
        "4 checkpoints: nothing is wrong with them, but whether 1 of them shares their birth cannot be told"
    )


def test_a_single_checkpoint_is_said_to_be_alone(clean):
    found = sentence(audit(find_members([str(clean / "step-0")])))
    assert found == "one checkpoint, beside no other: nothing is wrong with it"


def test_revisions_of_the_hub_are_members_of_a_suite():
    found = find_members(["EleutherAI/pythia-14m@step0,step1000", "EleutherAI/pythia-14m"])
    assert [(member.name, member.step) for member in found] == [
        ("EleutherAI/pythia-14m@step0", 0), ("EleutherAI/pythia-14m@step1000", 1000), ("EleutherAI/pythia-14m", None),
    ]  # fmt: skip


def exactly_reversed(suite, steps):
    files = [weights_file(suite, step).read_bytes() for step in steps]
    for step, content in zip(steps, files[::-1], strict=True):
        weights_file(suite, step).write_bytes(content)


def test_a_suite_in_exactly_reversed_order_is_found_by_its_birth(suite, audited):
    """Its path is as short as the right one; but the vectors of a birth are constant."""
    exactly_reversed(suite, STEPS)
    found = audited(suite)
    assert found.kinds == {step: ["order"] for step in STEPS if step != 12}
    backwards = "the suite runs backwards from step 0 to step 24, "
    assert found.said[0].startswith(f"lies on the curve where step 24 should: {backwards}")
    assert "5 of 5 vectors of gains and biases are constant at the last checkpoint" in found.said[0]
    assert [name.rpartition("-")[2] for name in found.json["order"]] == [str(step) for step in STEPS[::-1]]
    assert found.json["direction"]["towards"] == "reversed"
    found = audited(suite / "step-0", suite / "step-24")
    assert found.kinds == {0: ["order"], 24: ["order"]}


def test_where_no_end_is_a_birth_the_direction_is_told_by_growth_or_not_at_all(suite, audited, capsys, tmp_path):
    for step in (0, 8):
        shutil.rmtree(suite / f"step-{step}")
    assert audited(suite, status=0).json["direction"]["towards"] == "as labelled"
    exactly_reversed(suite, (4, 12, 16, 20, 24))
    found = audited(suite, status=0)
    assert {one["verdict"] for one in found.json["checkpoints"]} == {"direction unknown"}
    assert found.json["sentence"].endswith(
        "nothing is wrong with them, but whether they stand in the order of training or in the reverse cannot be told"
    )
    assert main(["audit", str(suite), "--out", str(tmp_path / "a.html")]) == 0
    assert "note: direction unknown: at neither end are gains and biases constant" in capsys.readouterr().out
    assert "Direction unknown: at neither end" in (tmp_path / "a.html").read_text()
