"""`birthmark certify` and `verify`: commitments open with the right seed alone, and content is listed or not."""

import dataclasses
import hashlib
import json
import math
import shutil
import stat

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from birthmark.audit.certificate import commitment, content_of, order_inputs
from birthmark.audit.certificate_check import Opened
from birthmark.files import write_sealed_json
from birthmark.launch.cli import main
from birthmark.measure.records import RunDir
from birthmark.metrics.weight_kinship import Kinship
from birthmark.models.birth import born, digest
from birthmark.models.by_block import DrawnWeights, HeldWeights
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.models.parameter_shapes import tensor_shapes
from birthmark.trainer.by_name.model_names import open_source
from birthmark.trainer.config_file import read_config


@pytest.fixture(scope="module")
def certified(run_of_two_checkpoints, tmp_path_factory):
    """A run with its certificate and its secret."""
    run = shutil.copytree(run_of_two_checkpoints.path, tmp_path_factory.mktemp("certified") / "run")
    assert main(["certify", str(run)]) == 0
    return RunDir(run)


@pytest.fixture
def certificate(certified):
    return json.loads((certified.path / "certificate.json").read_text())


@pytest.fixture
def verified(certified, capsys):
    """``verified(checkpoint, *options, status=0)``: the answer as JSON."""

    def run(checkpoint, *options, status=0, certificate=None):
        capsys.readouterr()
        file = certificate or certified.path / "certificate.json"
        assert main(["verify", str(file), str(checkpoint), *map(str, options), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def revealed(certified):
    """The options of the right reveal."""
    return ["--reveal", 3, "--secret", certified.path / "certificate.secret.json"]


def slow_commitment(what, value, salt):
    """As docs/audit.md says it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(
        f"birthmark certificate 1 {what}\0".encode() + bytes.fromhex(salt) + text.encode()
    ).hexdigest()


def test_a_certificate_commits_and_shows_no_seed(certified, certificate):
    birth, config = json.loads(certified.birth.read_text()), open_source(str(certified.path)).births
    secret = certified.path / "certificate.secret.json"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    told = json.loads(secret.read_text())
    assert len(set(told["salt"])) > 4
    for what, value in (("init_seed", 3), ("birth", birth["digest"]), ("data_order", told["data_order"])):
        assert certificate["commitments"][what] == slow_commitment(what, value, told["salt"])
    assert told["data_order"]["data"]["data_seed"] == config.data.data_seed == 5
    assert told["data_order"]["corpus"] == {name: value for name, value in birth["data"].items() if name != "path"}
    assert "cache_dir" not in told["data_order"]["data"]
    text = json.dumps(certificate)
    assert birth["digest"] not in text
    assert text.count("seed") == 1  # the name of its commitment
    # What it lists is the digest of a birth, taken of the trained model.
    for one in certificate["checkpoints"]:
        model = open_source(f"{certified.path}@{one['step']}").load()
        assert digest(model) == one["float32"]
        assert digest(model.bfloat16().float()) == one["bfloat16"]
    rest = {name: value for name, value in certificate.items() if name != "sha256"}
    assert hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest() == certificate["sha256"]


def test_the_order_of_data_has_all_that_decides_a_step_and_no_place_of_a_file(certified, tmp_path):
    config, corpus = read_config(certified.config), json.loads(certified.birth.read_text())["data"]
    found, replace, trainer = order_inputs(config, corpus), dataclasses.replace, config.trainer
    ramp = replace(trainer.batch_ramp, start=1, increment=1, sequences=8)
    for changes in (
        {"data": replace(config.data, data_seed=6)},
        {"model": replace(config.model, max_seq_len=config.model.max_seq_len // 2)},
        {"trainer": replace(trainer, global_batch_size=2 * trainer.global_batch_size)},
        {"trainer": replace(trainer, batch_ramp=ramp)},
    ):
        assert order_inputs(replace(config, **changes), corpus) != found
    assert order_inputs(config, corpus | {"n_tokens": -1}) != found
    assert order_inputs(config, corpus | {"path": "elsewhere"}) == found
    for name in ("a.txt", "b.txt", "c.txt", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    text, aside, tasks, tokenizer = (str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt", "tokenizer.json"))
    moved = replace(config.data, path=text, val_path=aside, tokenizer=tokenizer, decontaminate=tasks)
    assert order_inputs(replace(config, data=moved), corpus) == found


def test_a_later_certificate_commits_to_the_same(certified, certificate, tmp_path, capsys, refused):
    assert "certificate.json: exists already; give --out another name" in refused("certify", certified.path)
    assert main(["certify", str(certified.path), "--out", str(tmp_path / "later.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == certificate


def test_a_certificate_of_a_later_version_opens_with_the_secret_that_was_kept(
    certified, verified, revealed, tmp_path, refused
):
    """Its configs may have more fields, or fewer, than those of the version that wrote the secret."""
    run = shutil.copytree(certified.path, tmp_path / "run")
    secret, (reveal, seed, option, _) = run / "certificate.secret.json", revealed
    kept = json.loads(secret.read_text())
    del kept["data_order"]["data"]["stream"]
    kept["data_order"]["corpus"]["of_old"] = 1
    kept["data_order"]["data"]["epochs"] = 50.0  # as a resumed run may change it
    secret.write_text(json.dumps(kept))
    assert main(["certify", str(run), "--out", str(tmp_path / "later.json")]) == 0
    opened = verified(run, reveal, seed, option, secret, certificate=tmp_path / "later.json")["reveal"]
    assert opened["data_order"] is True
    assert json.loads((tmp_path / "later.json").read_text())["commitments"]["data_order"] == slow_commitment(
        "data_order", kept["data_order"], kept["salt"]
    )
    kept["data_order"]["data"]["data_seed"] = 6
    secret.write_text(json.dumps(kept))
    said = refused("certify", run, "--out", tmp_path / "last.json", status=1)
    assert f"{secret}: says data_order.data.data_seed 6, and the run gives 5; restore both from a copy" in said
    kept["data_order"]["data"] |= {"data_seed": 5, "sources": [{"path": "more"}]}
    secret.write_text(json.dumps(kept))
    said = refused("certify", run, "--out", tmp_path / "last.json", status=1)
    assert f"{secret}: says data_order.data.sources [{{'path': 'more'}}], and the run gives []; restore" in said


def test_values_that_no_json_has_have_no_commitment():
    """Nobody else could compute it."""
    for value in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            commitment("data_order", {"epochs": value}, bytes(32))


def test_a_checkpoint_at_birth_is_not_listed(certified, certificate, tmp_path, capsys):
    """Its digest is the birth's: seeds could be tried against it."""
    run = RunDir(shutil.copytree(certified.path, tmp_path / "run"))
    shutil.copytree(run.checkpoint(2), run.checkpoint(0))
    capsys.readouterr()
    assert main(["certify", str(run.path), "--out", str(tmp_path / "later.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == certificate


def test_a_checkpoint_is_listed_wherever_it_lies_and_descends_from_the_seed(
    certified, verified, revealed, tmp_path, capsys
):
    found = verified(certified.path)
    assert (found["verdict"], found["listed"], found["reveal"]) == ("listed", [{"step": 4, "as": "float32"}], None)
    alone = shutil.copytree(certified.checkpoint(2), tmp_path / "alone")
    found = verified(alone, *revealed)
    assert found["listed"] == [{"step": 2, "as": "float32"}]
    reveal = found["reveal"]
    assert [reveal[name] for name in ("init_seed", "birth", "data_order", "kin")] == [True] * 4
    assert reveal["cosine"] > 0.5
    assert reveal["p"] < 1e-6
    assert main(["export", str(certified.path), str(tmp_path / "theirs")]) == 0
    assert verified(tmp_path / "theirs", *revealed)["listed"] == [{"step": 4, "as": "float32"}]
    weights = tmp_path / "theirs" / "model.safetensors"
    config, whole = json.loads((weights.parent / "config.json").read_text()), load_file(weights)
    for dtype in ("bfloat16", "float16"):
        rounded = {name: tensor.to(getattr(torch, dtype)) for name, tensor in whole.items()}
        save_file(rounded, weights, {"format": "pt"})
        (weights.parent / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
        assert verified(weights.parent)["listed"] == [{"step": 4, "as": dtype}]
    capsys.readouterr()
    assert main(["verify", str(certified.path / "certificate.json"), str(alone), *map(str, revealed)]) == 0
    told = capsys.readouterr().out
    assert f"{alone}: verified: the certificate lists it, as step 2\n" in told
    assert "birth       drawn again, is the one committed to" in told
    assert "descent     kin of the birth" in told


def test_the_birth_itself_is_what_it_commits_to(certified, verified, revealed, tmp_path):
    assert verified(f"{certified.path}@0", status=3)["verdict"] == "unlisted"
    found = verified(f"{certified.path}@0", *revealed)
    assert found["sentence"].endswith("verified: the birth that the certificate commits to")
    assert main(["export", f"{certified.path}@0", str(tmp_path / "theirs")]) == 0
    for dtype in (torch.bfloat16, torch.float16):
        shutil.copytree(tmp_path / "theirs", rounded := tmp_path / str(dtype))
        changed(rounded, lambda name, tensor, dtype=dtype: tensor.to(dtype).float())
        assert verified(rounded, *revealed)["sentence"] == found["sentence"].replace(
            f"{certified.path}@0", str(rounded)
        )


def test_contents_under_several_names_are_listed_once_a_step_and_in_order(certified, certificate, verified, tmp_path):
    """A checkpoint that was stored rounded has one digest under several names."""
    last = certificate["checkpoints"][-1]["float32"]
    alike = [{**one, "float32": last, "bfloat16": last} for one in certificate["checkpoints"]]
    (tmp_path / "alike.json").write_text(sealed(certificate | {"checkpoints": alike}))
    found = verified(certified.path, certificate=tmp_path / "alike.json")
    assert found["listed"] == [{"step": 2, "as": "float32"}, {"step": 4, "as": "float32"}]


def changed(folder, change):
    file = folder / "model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def test_what_is_not_listed_is_kin_or_a_stranger(certified, verified, revealed, tmp_path):
    assert main(["export", str(certified.path), str(tmp_path / "theirs")]) == 0
    # A change that rounding to bfloat16 takes away is one.
    changed(tmp_path / "theirs", lambda name, tensor: tensor.nextafter(torch.zeros(())))
    assert verified(tmp_path / "theirs", status=3)["verdict"] == "unlisted"
    changed(tmp_path / "theirs", lambda name, tensor: tensor * 1.01)
    assert verified(tmp_path / "theirs", status=3)["verdict"] == "unlisted"
    found = verified(tmp_path / "theirs", *revealed, status=3)
    assert found["verdict"] == "kin"
    assert found["sentence"].endswith("does not list it, but it is kin of the birth")
    numbers = torch.Generator().manual_seed(0)
    changed(tmp_path / "theirs", lambda name, tensor: torch.randn(tensor.shape, generator=numbers))
    assert verified(tmp_path / "theirs", *revealed, status=3)["verdict"] == "stranger"
    # Nobody's model may be listed either, and shown to descend from a seed that it does not descend from.
    lie = json.loads((certified.path / "certificate.json").read_text())
    del lie["sha256"]
    lie["checkpoints"][0]["float32"] = verified(tmp_path / "theirs", status=3)["digest"]
    lie["sha256"] = hashlib.sha256(json.dumps(lie, sort_keys=True).encode()).hexdigest()
    (tmp_path / "lie.json").write_text(json.dumps(lie))
    found = verified(tmp_path / "theirs", *revealed, status=3, certificate=tmp_path / "lie.json")
    assert (found["verdict"], found["verified"], found["reveal"]["kin"]) == ("listed", False, False)


def test_a_certificate_of_another_birth_or_another_order_of_data_does_not_hold(
    certified, certificate, verified, revealed, tmp_path, capsys
):
    other = {"birth": "data_order", "data_order": "birth"}
    for what in other:
        known = certificate["commitments"]
        lie = certificate | {"commitments": known | {what: known[other[what]]}}
        (tmp_path / "lie.json").write_text(sealed(lie))
        found = verified(certified.path, *revealed, status=3, certificate=tmp_path / "lie.json")
        assert (found["verdict"], found["verified"], found["reveal"]["kin"]) == ("listed", False, True)
        assert [name for name in ("init_seed", "birth", "data_order") if not found["reveal"][name]] == [what]
        assert main(["verify", str(tmp_path / "lie.json"), str(certified.path), *map(str, revealed)]) == 3
        said = {"birth": "drawn again, is not the one committed to", "data_order": "data order  is not what was"}
        assert said[what] in capsys.readouterr().out


def test_too_few_tensors_show_no_descent():
    kin = Kinship(cosine=0.9, p=math.nan)
    assert kin.verdict is None
    assert not Opened(init_seed=True, birth=True, kin=kin).holds


def test_a_wrong_reveal_opens_nothing(certified, verified, certificate, capsys):
    secret = certified.path / "certificate.secret.json"
    salt = json.loads(secret.read_text())["salt"]
    for options in (("--reveal", 4, "--secret", secret), ("--reveal", 3, "--salt", "0" * 64)):
        found = verified(certified.path, *options, status=3)
        assert found["listed"]
        assert found["reveal"]["init_seed"] is found["reveal"]["birth"] is False
    found = verified(certified.path, "--reveal", 3, "--salt", salt)
    assert found["reveal"]["data_order"] is None
    assert (
        main(["verify", str(certified.path / "certificate.json"), str(certified.path), "--reveal=4", f"--salt={salt}"])
        == 3
    )
    assert "init_seed   does not open the commitment" in capsys.readouterr().out


def sealed(content):
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return json.dumps(rest | {"sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()})


def test_a_bad_statement_is_told_in_a_line(certified, certificate, refused, tmp_path):
    file, run = tmp_path / "c.json", certified.path

    def verify(content, *options):
        file.write_text(content)
        return refused("verify", file, run, *options, status=1)

    edited = json.loads(json.dumps(certificate))
    edited["config"]["max_steps"] = 5
    assert "its SHA-256 is not the one in it" in verify(json.dumps(edited))
    lacking = {name: value for name, value in certificate.items() if name != "commitments"}
    assert "commitments" in verify(sealed(lacking))
    assert "sha256" in verify(json.dumps({name: value for name, value in certificate.items() if name != "sha256"}))
    edited["config"]["model"]["d_model"] = "wide"
    assert "config.model is none of this version" in verify(sealed(edited))
    edited["config"]["model"] = certificate["config"]["model"] | {"attention": {"normaliser": "os:system"}}
    assert "config.model.attention.normaliser names code" in verify(sealed(edited))
    assert "damaged JSON" in verify("{")
    file.write_text(json.dumps(certificate))
    assert "missing" in refused("verify", tmp_path / "none.json", run, status=1)
    for options, told in (
        (["--reveal", "3"], "give one of --salt and --secret"),
        (["--salt", "00"], "give --reveal SEED too"),
        (["--reveal", "3", "--salt", "00"], "--salt 00: no salt"),
        (["--reveal", str(1 << 70), "--salt", "00"], "no seed"),
    ):
        assert told in refused("verify", file, run, *options)
    assert "neither a run" in refused("verify", file, tmp_path)


def test_a_model_of_another_shape_is_told_and_not_read(certified, verified, tmp_path, refused):
    found = verified("demo@0", status=3)
    assert found["verdict"] == "other model"
    assert "another model than the certificate's (embed.weight is [" in found["sentence"]
    deeper = yaml.safe_load(certified.config.read_text())
    deeper["model"]["n_layers"] = 3
    (tmp_path / "deeper.yaml").write_text(yaml.safe_dump(deeper))
    found = verified(f"{tmp_path / 'deeper.yaml'}@3", status=3)
    assert "blocks.2.attn.k.weight is in none of the certificate's model" in found["sentence"]
    deeper["model"] |= {"n_layers": 2, "attention": {"normaliser": "json:JSONDecoder"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(deeper))
    assert "has parts of its owner's own" in refused(
        "verify", certified.path / "certificate.json", f"{tmp_path / 'own.yaml'}@3"
    )


def test_a_run_that_no_seed_gives_again_is_not_certified(certified, refused, tmp_path, seal_config):
    run = shutil.copytree(certified.path, tmp_path / "run")
    text = certified.config.read_text().rpartition("# sha256")[0]
    seal_config(run / "config.yaml", text.replace("init_from: ''", f"init_from: {certified.path}@4"))
    (run / "certificate.json").unlink()
    assert "certify the run that it is of" in refused("certify", run)
    # A class of the owner's own: nobody else can draw its parameters, nor is its code in the certificate.
    seal_config(run / "config.yaml", text.replace("normaliser: softmax\n", "normaliser: json:JSONDecoder\n"))
    assert "model.attention.normaliser is a class of your own, which others cannot draw again" in refused(
        "certify", run
    )
    assert "not a run" in refused("certify", tmp_path)


def test_buffers_count_and_tied_tensors_count_once():
    calibrated = AttentionConfig(aggregation="calibrated", calibration=CalibrationConfig(correlation="estimated"))
    config = ModelConfig(
        d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=8, tie_embeddings=True, attention=calibrated
    )
    model = born(config, 1)
    shapes = tensor_shapes(config)
    assert shapes.keys() > dict(model.named_parameters()).keys()
    found = content_of(shapes, HeldWeights(model))
    assert found.float32 == content_of(shapes, DrawnWeights(config, 1)).float32
    name = next(name for name, _ in model.named_buffers() if name in shapes)
    dict(model.named_buffers())[name].add_(1)
    assert content_of(shapes, HeldWeights(model)).float32 != found.float32
    plain = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=8, tie_embeddings=True)
    assert content_of(tensor_shapes(plain), DrawnWeights(plain, 1)).float32 == digest(born(plain, 1))


@pytest.mark.parametrize(
    ("field", "said"), [("digest", "0" * 64), ("n_params", 7), ("init_seed", 7), ("init_from", "x"), ("data_seed", 7)]
)
def test_a_birth_that_config_and_seed_do_not_give_is_not_certified(
    run_of_two_checkpoints, tmp_path, field, said, refused
):
    run = RunDir(shutil.copytree(run_of_two_checkpoints.path, tmp_path / "run"))
    record = json.loads(run.birth.read_text())
    record.pop("sha256")
    write_sealed_json(run.birth, record | {field: said})
    line = refused("certify", run.path, status=1)
    assert f"birth.json: says {field} {str(said)[:20]}, and config.yaml gives " in line
    assert not (run.path / "certificate.json").exists()
