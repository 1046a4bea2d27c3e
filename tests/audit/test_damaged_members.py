"""`birthmark audit`: files that are damaged, dangerous or of another model are rows, and the audit goes on."""

import json
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from trained_suites import CONFIG, STEPS, exchange, weights_file

from birthmark.audit import pickled_weights
from birthmark.audit.audit import audit
from birthmark.audit.checkpoint import _pickled, find_members
from birthmark.audit.weight_samples import sample
from birthmark.audit.weights import HeldWeights, open_safetensors
from birthmark.child_python import python_command, python_environment
from birthmark.errors import RunError
from birthmark.launch.cli import main
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained


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


def test_a_checkpoint_that_its_training_deletes_meanwhile_is_no_fault(suite):
    """`trainer.keep_last` made a run that trained one with a damaged checkpoint, by status and verdict."""
    members = find_members([str(suite)])
    shutil.rmtree(suite / "step-8")
    found = audit(members)
    assert found.is_right
    assert [one.member.step for one in found.judged] == [step for step in STEPS if step != 8]
    assert "deleted while the suite was read, and not judged: step 8" in found.notes
    shutil.rmtree(suite)  # or its disk is gone
    with pytest.raises(RunError, match="step-0: deleted while the suite was read, as all of it"):
        audit(members)


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
    kind = {"dtype": "F32", "shape": [2, 2]}
    header = {name: kind | {"data_offsets": list(span)} for name, span in zip("ab", spans, strict=True)}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(max(stop for _, stop in spans)))
    if message is None:
        assert {name: entry.numel for name, entry in open_safetensors(tmp_path).entries.items()} == {"a": 4, "b": 4}
    else:
        with pytest.raises(RunError, match=f"damaged header.*{message}"):
            open_safetensors(tmp_path)


def test_a_header_that_repeats_a_name_is_damaged(tmp_path):
    """A tensor's, of which readers take either; or that of the metadata, which safetensors refuses too."""
    a = '"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}'
    for repeated, rest in ((a, a), ('"__metadata__": {}', a)):
        text, file = f"{{{repeated}, {repeated}, {rest}}}".encode(), tmp_path / "model.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        with pytest.raises(RunError, match=r"damaged header \(an object has the key '(a|__metadata__)' twice\)"):
            open_safetensors(tmp_path)
    with pytest.raises(SafetensorError), safe_open(file, "pt"):
        pass


def test_an_index_that_names_a_file_elsewhere_and_another_vocabulary_are_found(suite, audited):
    index = {"metadata": {}, "weight_map": {"a": "../step-8/model.safetensors"}}
    (suite / "step-4" / "model.safetensors.index.json").write_text(json.dumps(index))
    for step in STEPS:
        tokens = ("b", "a") if step == 16 else ("a", "b")
        content = {"version": "1.0", "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}}}
        (suite / f"step-{step}" / "tokenizer.json").write_text(json.dumps(content))
    found = audited(suite)
    assert found.kinds == {4: ["damaged"], 16: ["tokenizer"]}
    assert "names '../step-8/model.safetensors', outside of this folder" in found.said[4]


class Planted:
    """Runs code where it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (exec, (f"open({str(self.file)!r}, 'w').close()",))


RARE = {
    "packed": torch.arange(64, dtype=torch.int64).to(torch.uint32),
    "ids": torch.arange(64, dtype=torch.int64).to(torch.uint64),
    "pixels": torch.arange(64, dtype=torch.int64).to(torch.uint16),
    "scales": torch.arange(64, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(8, 8),
    "freqs_cis": torch.polar(torch.ones(8, 8), torch.zeros(8, 8)),
}


def test_tensors_of_rare_types_are_read_and_are_no_weights(tmp_path):
    """As MLX packs weights, and as a table of rotations is complex."""
    for step in (1, 2):
        (tmp_path / f"step{step}").mkdir()
        save_file(RARE | {"w": step * torch.randn(8, 8)}, tmp_path / f"step{step}" / "model.safetensors")
    found = audit(find_members([str(tmp_path)]))
    assert [one.findings for one in found.judged] == [[], []]
    sampled = [one.content.sampled for one in found.judged]
    assert [(set(one.values), one.vectors) for one in sampled] == [({"w"}, {}), ({"w"}, {})]
    assert {name for name in sampled[0].digests if sampled[0].digests[name] == sampled[1].digests[name]} == {*RARE}
    in_memory = sample(HeldWeights(RARE), scan=True)
    assert in_memory.digests == {name: sampled[0].digests[name] for name in RARE}
    assert in_memory.n_bytes == sum(tensor.nbytes for tensor in RARE.values())


def test_a_type_that_is_not_read_is_named(tmp_path):
    text = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(3))
    with pytest.raises(RunError, match=r"safetensors: a is of type F6_E2M3, which this version does not read$"):
        open_safetensors(tmp_path)
    with pytest.raises(RunError, match=r"^a is of type torch\.complex128$"):
        HeldWeights({"a": torch.zeros(3, dtype=torch.complex128)})


def test_of_a_trainers_folder_only_the_weights_are_read(tmp_path):
    """Pickled states of the optimizer, of the schedule and of random numbers lie beside them."""
    state = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin")
    for weights in (["pytorch_model.bin"], ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
                    ["consolidated.00.pth"], ["optimizers_of_glass.pt"], ["schedulers.bin", "model.pt"]):  # fmt: skip
        folder = tmp_path / weights[0]
        folder.mkdir()
        for name in (*weights, *state):
            (folder / name).touch()
        assert [file.name for file in _pickled(folder)] == sorted(weights)


@pytest.mark.heavy
def test_pickled_weights_are_read_and_planted_code_is_not_run(suite, audited, tmp_path, python, monkeypatch):
    monkeypatch.setattr("sys.executable", python)
    for step in (4, 8, 12, 16):
        tensors = load_file(weights_file(suite, step))
        weights_file(suite, step).unlink()
        file = suite / f"step-{step}" / "pytorch_model.bin"
        if step == 4:
            torch.save({"state_dict": tensors}, file)
            torch.save({"state": {}, "param_groups": [{"lr": 1e-3}]}, file.with_name("optimizer.pt"))
            torch.save({"python": (3, 1), "more": Planted(tmp_path / "ran")}, file.with_name("rng_state.pth"))
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


def test_a_tensor_of_many_axes_damages_its_checkpoint_alone(suite, audited):
    file = weights_file(suite, 8)
    text = json.dumps({"a": {"dtype": "F32", "shape": [1] * 70 + [4], "data_offsets": [0, 16]}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + np.array([1, 1e30, 2, 3], np.float32).tobytes())
    found = audited(suite)
    assert found.kinds == {8: ["damaged"]}
    assert "model.safetensors: damaged header (a has 71 axes)" in found.said[8]
    with pytest.raises(RunError, match=r"^a has 17 axes$"):
        HeldWeights({"a": torch.zeros([1] * 17)})


def hashed(path):
    """Write an archive whose pickle has a key of 2^60 nested tuples."""
    steps = b"".join(b"h" + bytes([i - 1]) + b"\x86q" + bytes([i]) for i in range(1, 60))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02})q\x00" + steps + b"K\x01s.")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return path


@pytest.mark.heavy
def test_a_small_pickle_gets_little_time(tmp_path, monkeypatch):
    hasty = "import birthmark.audit.pickled_weights as p; p._LEAST_CPU_S = 1"
    monkeypatch.setattr(pickled_weights, "_CHILD", f"{hasty}; {pickled_weights._CHILD}")
    with pytest.raises(RunError, match=r"model\.bin: takes more time than a checkpoint of its size; not read$"):
        pickled_weights.sample_pickled([hashed(tmp_path / "model.bin")], scan=False)


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ties a process to its parent")
def test_the_reader_ends_with_its_parent(tmp_path):
    """The parent is killed, and its child would hash for minutes."""
    command = python_command("-c", pickled_weights._CHILD, hashed(tmp_path / "a.bin"), tmp_path / "out", "0")
    start = f"import subprocess; print(subprocess.Popen({command}).pid, flush=True); input()"
    parent = subprocess.Popen(
        python_command("-c", start), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=python_environment()
    )
    place = Path("/proc") / parent.stdout.readline().decode().strip()
    while "libtorch" not in (place / "maps").read_text():  # imported once it is tied
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while place.exists() and ") Z " not in (place / "stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_system_without_limits_reads_no_pickle(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"this system has no limits .*; convert it to safetensors$"):
        pickled_weights.sample_pickled([hashed(tmp_path / "model.bin")], scan=False)


@pytest.mark.heavy
def test_a_pickle_that_takes_too_much_memory_is_a_row(tmp_path, python, monkeypatch):
    monkeypatch.setattr("sys.executable", python)
    monkeypatch.setattr(pickled_weights, "_CHILD", "import sys; sys.exit(1)")
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.pt")
    with pytest.raises(RunError, match="its reader ended without a word; not read"):
        pickled_weights.sample_pickled([tmp_path / "model.pt"], scan=False)


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


SCALING = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
LAYERS = ["full_attention"] * 11


@pytest.mark.parametrize(
    ("usual", "value", "said"),
    [
        (
            SCALING,
            SCALING | {"original_max_position_embeddings": 32},
            (".original_max_position_embeddings", "32", "8192"),
        ),
        (SCALING, SCALING | {"rope_type": None}, (".rope_type", "null", "missing")),
        (SCALING, dict(reversed(SCALING.items())), None),
        (LAYERS, [*LAYERS[:10], "sliding"], (".10", '"sliding"', '"full_attention"')),
        (LAYERS, LAYERS[:10], (".10", "missing", '"full_attention"')),
        (70 * "a" + "b", 70 * "a" + "c", ("[70:]", '"c"', '"b"')),
        (int(70 * "1" + "2"), int(70 * "1" + "3"), ("[70:]", '"3"', '"2"')),
    ],
    ids=["number", "added", "order", "list", "short", "text", "large"],
)
def test_configs_are_compared_in_full_whatever_the_order_of_keys(tmp_path, usual, value, said):
    for step, own in ((1, usual), (2, usual), (3, value)):
        (tmp_path / f"step{step}").mkdir()
        save_file({"a": torch.zeros(3)}, tmp_path / f"step{step}" / "model.safetensors")
        (tmp_path / f"step{step}" / "config.json").write_text(json.dumps({"x": own}))
    found = [one for judged in audit(find_members([str(tmp_path)])).judged for one in judged.findings]
    lines = [one.what for one in found if one.kind == "config"]
    assert lines == (["its config has x{} {}, and that of most others {}".format(*said)] if said else [])


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


@pytest.mark.heavy
def test_where_nothing_is_readable_each_file_has_its_reason(suite, audited, tmp_path, capsys, python, monkeypatch):
    monkeypatch.setattr("sys.executable", python)
    for step in (0, 4, 8):
        weights_file(suite, step).write_bytes(bytes(range(256)) * (step + 1))
    weights_file(suite, 12).write_bytes(b"")
    for step, content in ((16, pickle.dumps(Planted(tmp_path / "ran"))), (20, b"\x80garbage"), (24, b"")):
        weights_file(suite, step).unlink()
        (suite / f"step-{step}" / "pytorch_model.bin").write_bytes(content)
    found = audited(suite)
    assert found.json["sentence"] == "none of 7 checkpoints can be read"
    assert found.kinds == {step: ["damaged"] for step in STEPS}
    assert found.json["births"] == found.json["order"] == []
    assert not (tmp_path / "ran").exists()
    assert all(found.said[step].startswith("model.safetensors: ") for step in STEPS[:4])
    assert all(found.said[step].startswith("pytorch_model.bin: ") for step in STEPS[4:])
    assert main(["audit", str(suite), "--out", str(tmp_path / "a.html")]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "none of 7 checkpoints can be read"
    said = [line for line in lines if "model.safetensors: " in line or "pytorch_model.bin: " in line]
    assert [sum(f"step-{step}" in line.partition(": ")[0].split(", ") for line in said) for step in STEPS] == [1] * 7
    assert "None of 7 checkpoints can be read." in (tmp_path / "a.html").read_text()
