"""`birthmark audit`: planted faults are found, each by one command, and a clean suite has none."""

import csv
import json
import math
import pickle
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from birthmark.audit import pickled_weights
from birthmark.audit.suite import find_members, said_step
from birthmark.audit.weight_samples import run_starts, sample
from birthmark.audit.weights import HeldWeights, open_safetensors
from birthmark.errors import RunError
from birthmark.launch.cli import main
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import load_pretrained, save_pretrained

CONFIG = ModelConfig(d_model=32, n_layers=2, n_heads=2, vocab_size=64, max_seq_len=16)
STEPS = (0, 4, 8, 12, 16, 20, 24)


def constant(step):
    return 1.0


def train(seed, folder, steps=STEPS, schedule=constant, model=None, language=0):
    """A short training on a bigram language, with a folder of transformers at each of the steps."""
    model, numbers = model or born(CONFIG, seed).train(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    table = torch.randperm(64, generator=torch.Generator().manual_seed(language))
    for step in range(steps[0], steps[-1] + 1):
        if step in steps:
            save_pretrained(model, folder / f"step-{step}")
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * schedule(step)
        tokens = [torch.randint(64, (8, 1), generator=numbers)]
        for _ in range(15):
            noise = torch.rand(8, 1, generator=numbers) < 0.2
            tokens.append(torch.where(noise, torch.randint(64, (8, 1), generator=numbers), table[tokens[-1]]))
        read = torch.cat(tokens, 1)
        optimizer.zero_grad()
        model(read[:, :-1], targets_BS=read[:, 1:]).objective.backward()
        optimizer.step()
    return folder


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return train(0, tmp_path_factory.mktemp("suites") / "clean")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return train(1, tmp_path_factory.mktemp("suites") / "other")


@pytest.fixture
def suite(clean, tmp_path):
    """One to plant faults in."""
    return shutil.copytree(clean, tmp_path / "suite")


@pytest.fixture
def audited(capsys):
    """``audited(*names, status=…)``: what the command prints, and the kinds of findings by step."""

    def run(*names, status=3):
        capsys.readouterr()
        assert main(["audit", *map(str, names), "--json"]) == status
        found = json.loads(capsys.readouterr().out)
        kinds = {one["step"]: [f["kind"] for f in one["findings"]] for one in found["checkpoints"] if one["findings"]}
        said = {one["step"]: " | ".join([*(f["what"] for f in one["findings"]), *one["notes"]])
                for one in found["checkpoints"]}  # fmt: skip
        return SimpleNamespace(json=found, kinds=kinds, said=said)

    return run


def weights_file(suite, step):
    return suite / f"step-{step}" / "model.safetensors"


def exchange(suite, a, b):
    files = [weights_file(suite, step).read_bytes() for step in (a, b)]
    weights_file(suite, a).write_bytes(files[1])
    weights_file(suite, b).write_bytes(files[0])


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


def test_another_config_and_other_tensors_are_found(suite, audited):
    config = suite / "step-8" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 7.0, "rope_parameters": None}))
    file = weights_file(suite, 16)
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file)
    found = audited(suite)
    assert set(found.kinds) == {8, 16}
    assert set(found.kinds[8]) == {"config"}
    assert "its config has rope_theta 7.0, and that of most others " in found.said[8]
    assert found.kinds[16] == ["tensors"]
    assert f"{name} is F32 [32, " in found.said[16]


def test_truncated_empty_and_missing_files_are_rows_and_the_audit_goes_on(suite, audited):
    whole = weights_file(suite, 4).read_bytes()
    weights_file(suite, 4).write_bytes(whole[:-100])
    weights_file(suite, 8).write_bytes(b"")
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (suite / "step-12" / "model.safetensors.index.json").write_text(json.dumps(index))
    weights_file(suite, 16).write_bytes(whole[:4])
    found = audited(suite)
    assert found.kinds == {step: ["damaged"] for step in (4, 8, 12, 16)}
    assert f"truncated (it has {len(whole) - 100:,} bytes, and its header says {len(whole):,})" in found.said[4]
    assert found.said[8] == "model.safetensors: is empty"
    assert "model-00001-of-00002.safetensors: missing" in found.said[12]
    assert "truncated" in found.said[16]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 16), (16, 32)], None),
        ([(0, 16), (20, 36)], "tensors overlap, or leave a gap"),
        ([(0, 16), (8, 24)], "tensors overlap, or leave a gap"),
        ([(0, 16), (16, 40)], r"b is F32 \[2, 2\], and has 24 bytes"),
        ([(0, 16), (16, 24)], r"b is F32 \[2, 2\], and has 8 bytes"),
    ],
)
def test_a_header_whose_tensors_do_not_fill_the_file_is_damaged(tmp_path, spans, message):
    header = {
        name: {"dtype": "F32", "shape": [2, 2], "data_offsets": list(span)}
        for name, span in zip("ab", spans, strict=True)
    }
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(max(stop for _, stop in spans)))
    if message is None:
        assert {name: entry.numel for name, entry in open_safetensors(tmp_path).entries.items()} == {"a": 4, "b": 4}
    else:
        with pytest.raises(RunError, match=f"damaged header.*{message}"):
            open_safetensors(tmp_path)


def test_an_index_that_names_a_file_elsewhere_and_another_vocabulary_are_found(suite, audited):
    index = {"metadata": {}, "weight_map": {"a": "../step-8/model.safetensors"}}
    (suite / "step-4" / "model.safetensors.index.json").write_text(json.dumps(index))
    for step in STEPS:
        tokens = ("b", "a") if step == 16 else ("a", "b")
        content = {"version": "1.0", "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}}}
        (suite / f"step-{step}" / "tokenizer.json").write_text(json.dumps(content))
    found = audited(suite)
    assert found.kinds == {4: ["damaged"], 16: ["tokenizer"]}
    assert "names ../step-8/model.safetensors, outside of its folder" in found.said[4]


def flip(file, bit, at=1001):
    """Flip a bit of one value of the first large tensor."""
    weights = open_safetensors(file.parent)
    name = max(weights.entries, key=lambda n: weights.entries[n].numel)
    content = bytearray(file.read_bytes())
    content[weights.parts[name][0].offset + 4 * at + bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return name


def test_one_flipped_value_is_found(suite, audited):
    name = flip(weights_file(suite, 8), 30)
    found = audited(suite)
    assert found.kinds == {8: ["values"]}
    width = open_safetensors(suite / "step-8").entries[name].shape[1]
    assert f"{name}[{1001 // width}, {1001 % width}] is " in found.said[8]
    assert "where the median is" in found.said[8]


def test_a_copy_with_one_changed_value_is_no_copy(clean, tmp_path, audited):
    """Of a tensor that is large enough to be sampled, in a place that no sample has."""
    tensor = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    starts = run_starts("large", tensor.numel())
    assert starts
    free = next(i for i in range(tensor.numel()) if not any(start <= i < start + 64 for start in starts))
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
        moved = tensor.clone()
        if step == 3:
            moved.view(-1)[free] += 1e-3
        save_file({"large": moved, "n": torch.arange(5)}, weights_file(tmp_path, step))
    found = audited(tmp_path)
    assert found.kinds == {1: ["duplicate"], 2: ["duplicate"], 3: ["values"]}
    assert "but for 1 of 90,005 values (first large[0, " in found.said[3]


def test_a_thousandth_of_the_bytes_is_read():
    weights = HeldWeights({"w": torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))})
    found = sample(weights, scan=False)
    assert found.bytes_read < 0.01 * found.n_bytes
    assert found.n_bytes == 4 << 21
    np.testing.assert_array_equal(
        found.values["w"][3], weights.tensors["w"][(start := run_starts("w", 1 << 21)[3]) : start + 64]
    )


def test_steps_are_read_from_names():
    names = {"step1000": 1000, "step-00000020": 20, "checkpoint-500": 500, "iter_0002000": 2000, "global_step40": 40}
    assert {name: said_step(name) for name in names} == names
    assert said_step("pythia-160m") is said_step("main") is said_step("footstep3") is None


def test_checkpoints_without_a_step_are_put_where_they_lie(suite, audited, tmp_path):
    (suite / "step-12").rename(suite / "final")
    found = audited(suite, status=0)
    assert found.said[None] == "names no step: by its weights between step 8 and step 16"
    for letter, step in zip("dbcaef", (0, 4, 8, 16, 20, 24), strict=True):
        (suite / f"step-{step}").rename(suite / letter)
    (suite / "final").rename(suite / "g")
    found = audited(suite, status=0)
    order = [name.rpartition("/")[2] for name in found.json["order"]]
    assert order in ([*"dbcgaef"], [*"dbcgaef"][::-1])


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


def test_a_detour_from_which_the_next_step_is_back_is_found_alone(tmp_path, audited):
    """Steps of one length and one direction; at 60 the weights lie three of them aside."""
    numbers = torch.Generator().manual_seed(0)
    begin, along, aside = (
        {f"t{i}": torch.randn(32, 64, generator=numbers) for i in range(5)} for _ in range(3)
    )  # fmt: skip
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
        small(tmp_path / f"step-{step}", a)
    assert [len(birth) for birth in audited(tmp_path).json["births"]] == [3, 2]


def test_too_few_tensors_for_a_test_make_no_strangers(tmp_path, audited):
    for step in (1, 2):
        small(tmp_path / f"step-{step}", {"t": torch.randn(32, 64, generator=torch.Generator().manual_seed(step))})
    assert len(audited(tmp_path, status=0).json["births"]) == 1


class Planted:
    """Runs code where it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (exec, (f"open({str(self.file)!r}, 'w').close()",))


@pytest.mark.heavy
def test_pickled_weights_are_read_and_planted_code_is_not_run(suite, audited, tmp_path, python, monkeypatch):
    monkeypatch.setattr("sys.executable", python)
    for step in (4, 8, 12, 16):
        tensors = load_file(weights_file(suite, step))
        weights_file(suite, step).unlink()
        file = suite / f"step-{step}" / "pytorch_model.bin"
        if step == 4:
            torch.save({"state_dict": tensors}, file)
        elif step == 8:
            torch.save({**tensors, "more": Planted(tmp_path / "ran")}, file)
        elif step == 12:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("archive/data.pkl", pickle.dumps({}))
                archive.writestr("archive/data/0", bytes(10_000_000))
        else:
            file.write_bytes(pickle.dumps([1, 2]))
    found = audited(suite)
    assert found.kinds == {step: ["damaged"] for step in (8, 12, 16)}
    assert "holds more than tensors; not read" in found.said[8]
    assert not (tmp_path / "ran").exists()
    assert "unpacks to more than it is" in found.said[12]
    assert "pytorch_model.bin: " in found.said[16]
    (row,) = (one for one in found.json["checkpoints"] if one["step"] == 4)
    assert row["cosine_with_first"] > 0.9


def test_an_archive_that_says_more_than_it_holds_is_not_unpacked(tmp_path):
    file = tmp_path / "model.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", bytes(100))
    content = bytearray(file.read_bytes())
    at = content.index(b"PK\x01\x02") + 24  # its size, in the directory
    content[at : at + 4] = (1 << 30).to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(RunError, match="unpacks to more than it is"):
        pickled_weights.sample_pickled([file], scan=False)


@pytest.mark.heavy
def test_a_pickle_that_takes_too_much_memory_is_a_row(tmp_path, python, monkeypatch):
    monkeypatch.setattr("sys.executable", python)
    monkeypatch.setattr(pickled_weights, "_CHILD", "import sys; sys.exit(1)")
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.pt")
    with pytest.raises(RunError, match="its reader ended without a word; not read"):
        pickled_weights.sample_pickled([tmp_path / "model.pt"], scan=False)


def test_what_is_no_suite_is_told_in_a_line(clean, capsys, tmp_path):
    for name, told in ((tmp_path, "no checkpoint in it"), (clean / "step-0", "one checkpoint is no suite")):
        assert main(["audit", str(name)]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
    assert main(["audit", str(tmp_path / "none")]) == 2
    assert "no such run, folder of checkpoints, or hub id" in capsys.readouterr().err
    assert main(["audit", ""]) == 2
    assert "'': a name is empty" in capsys.readouterr().err


def test_people_see_a_table(clean, capsys):
    assert main(["audit", str(clean)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("7 checkpoints of one birth: nothing is wrong with them\n")
    assert "step-24" in out


def test_the_page_has_the_evidence_and_every_pair(suite, capsys, tmp_path):
    exchange(suite, 8, 12)
    weights_file(suite, 24).write_bytes(b"")
    (suite / "step-20").rename(suite / "<b>x")
    assert main(["audit", str(suite), "--out", str(tmp_path / "a.html")]) == 3
    assert capsys.readouterr().err == f"page: {tmp_path / 'a.html'}\n"
    page = (tmp_path / "a.html").read_text()
    assert "lies on the curve where step 12 should: the two are exchanged" in page
    assert "model.safetensors: is empty" in page
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page
    with (tmp_path / "a-data" / "pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 5 // 2
    a, b = (load_file(Path(rows[-1][name]) / "model.safetensors") for name in "ab")
    # Most tensors are small enough to be read whole.
    matrices = [name for name, tensor in a.items() if tensor.ndim > 1]
    cosines = [np.corrcoef(a[name].ravel(), b[name].ravel())[0, 1] for name in matrices]
    assert float(rows[-1]["cosine"]) == pytest.approx(np.mean(cosines), abs=1e-4)
    assert main(["audit", str(suite), "--out", str(tmp_path / "a.png")]) == 2
    assert "is no page; give a name that ends in .html" in capsys.readouterr().err


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
    assert found.said[0].startswith(
        "lies on the curve where step 24 should: the suite runs backwards from step 0 to step 24, "
    )
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


def test_names_without_steps_are_put_in_order_from_the_birth_on(clean, audited, tmp_path):
    for letter, step in zip("dcba", (0, 4, 8, 12), strict=True):
        shutil.copytree(clean / f"step-{step}", tmp_path / letter)
    found = audited(tmp_path, status=0)
    assert [name[-1] for name in found.json["order"]] == [*"dcba"]
    assert found.json["direction"]["towards"] in ("as labelled", "reversed")


def test_other_architectures_and_widths_are_rows_and_the_audit_goes_on(suite, audited):
    other = [ModelConfig(**{**vars(CONFIG), **fields}) for fields in (
        {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "bias": True}, {"d_model": 48})]  # fmt: skip
    for step, config in zip((8, 16), other, strict=True):
        shutil.rmtree(suite / f"step-{step}")
        save_pretrained(born(config, 0), suite / f"step-{step}")
    exchange(suite, 4, 12)
    found = audited(suite)
    assert set(found.kinds) == {4, 8, 12, 16}
    for step in (4, 12):
        assert found.kinds[step] == ["order"]
    assert set(found.kinds[8]) == set(found.kinds[16]) == {"tensors", "config"}
    usual = json.loads((suite / "step-0" / "config.json").read_text())["model_type"]
    assert found.said[8].startswith(f'its config has model_type "gpt2", and that of most others "{usual}" | ')
    assert found.said[16].startswith("its config has hidden_size 48, and that of most others 32 | ")
    assert all(len(kinds) <= 6 for kinds in found.kinds.values())


def test_another_tokenizer_is_found_by_the_part_that_differs(suite, audited):
    """Vocabulary, merges, or what is done to text before; not what a version of the library writes out."""
    content = {
        "version": "1.0", "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "ba": 3}, "merges": ["a b", "b a"]},
    }  # fmt: skip
    model = content["model"]
    changed = {
        4: content | {"pre_tokenizer": content["pre_tokenizer"] | {"use_regex": True}},  # written out
        8: content | {"model": model | {"merges": [["a", "b"], ["b", "a"]]}},  # as newer versions write it
        12: content | {"normalizer": {"type": "NFC"}},
        16: content | {"model": model | {"merges": ["b a", "a b"]}},
        20: content | {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        24: content | {"model": model | {"vocab": {"a": 1, "b": 0, "ab": 2, "ba": 3}}},
    }
    for step in STEPS:
        (suite / f"step-{step}" / "tokenizer.json").write_text(json.dumps(changed.get(step, content)))
    found = audited(suite)
    assert found.kinds == {step: ["tokenizer"] for step in (12, 16, 20, 24)}
    parts = {12: "normalizer", 16: "merges", 20: "pre_tokenizer.add_prefix_space", 24: "vocabulary"}
    for step, part in parts.items():
        assert found.said[step] == f"its tokenizer has another {part} than that of most others"
    for step in STEPS:
        (suite / f"step-{step}" / "tokenizer.json").unlink()
        (suite / f"step-{step}" / "tokenizer.model").write_bytes(b"b" if step == 8 else b"a")
    assert audited(suite).kinds == {8: ["tokenizer"]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_that_no_training_leaves_are_found_in_every_type(dtype):
    whole = (0.02 * torch.randn(300, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = {}
    for value in (0.1, -4096.0, float("-inf"), float("nan")):
        weights = HeldWeights({"w": whole.clone(), "zeros": torch.zeros(3, dtype=dtype)})
        weights.tensors["w"][7 * 64 + 5] = value
        found[value] = sample(weights, scan=True).broken
    assert found.pop(0.1) == []
    assert [len(broken) for broken in found.values()] == [1, 1, 1]
    huge, *unbounded = (broken[0] for broken in found.values())
    assert huge.startswith("w[7, 5] is 4.1e+03 in size, where the median is 0.01")
    assert unbounded == ["w has 1 NaN or inf"] * 2
