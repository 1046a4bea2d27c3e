"""What a config changes of a run on disk, and which of it a resumed run may not."""

from dataclasses import asdict

import pytest
import yaml

from birthmark.errors import RunError, UsageError
from birthmark.files import write_json, write_sealed_json
from birthmark.measure.records import RunDir
from birthmark.trainer.config_file import read_config
from birthmark.trainer.run_folder import check_resumable
from birthmark.trainer.saved_config import config_differences, write_config


@pytest.fixture
def run(tiny, tmp_path):
    """A run whose config was stored before two fields and a group of fields were thought of."""
    config = asdict(tiny({"trainer.max_steps": 7}))
    del config["model"]["attention"]["window"], config["optim"]["eps"], config["snapshot"]["fingerprint"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return RunDir(tmp_path)


@pytest.fixture
def own(tiny, tmp_path):
    """A run's folder as far as its config and certificate go, both of this version."""
    run = RunDir(tmp_path / "run")
    write_config(tiny(), run.config)
    birth = {"digest": "0" * 64, "init_seed": 3, "n_params": 1}
    write_sealed_json(run.birth, birth | {"config_is_sealed": True})
    return run, birth


def test_a_config_that_is_cut_off_anywhere_is_refused(own, tiny):
    run, _ = own
    assert read_config(run.config) == tiny()
    text = run.config.read_text()
    for end in (text.index("\n", at) for at in range(0, len(text) - 2, 97)):
        run.config.write_text(text[:end] if end < len(text) - 1 else text[:-1])
        with pytest.raises(RunError, match=r"config\.yaml: (cut off|changed since)"):
            read_config(run.config)
    run.config.write_text(text.replace("init_seed: 3", "init_seed: 4"))
    with pytest.raises(RunError, match=r"config\.yaml: changed since .*give them as options, --FIELD VALUE"):
        read_config(run.config)
    # The same text elsewhere is a config like any other.
    elsewhere = run.path.parent / "config.yaml"
    elsewhere.write_text(run.config.read_text())
    assert read_config(elsewhere).init_seed == 4


def test_the_config_of_an_older_run_opens_if_it_is_whole(own, tiny):
    run, birth = own
    write_json(run.birth, birth)
    text = "".join(run.config.read_text().splitlines(keepends=True)[:-1])
    run.config.write_text(text)
    assert read_config(run.config) == tiny()
    run.config.write_text(text[: text.index("\nlog:") + 1])
    with pytest.raises(RunError, match=r"config\.yaml: cut off"):
        read_config(run.config)


def test_the_config_of_an_older_run_opens_with_values_that_its_schedule_does_not_read(own, tiny, seal_config):
    run, _ = own
    fields = asdict(tiny())
    fields["optim"] |= {"schedule": "constant", "min_lr_ratio": 0.3, "decay_ratio": 0.5}
    seal_config(run.config, yaml.safe_dump(fields, sort_keys=False))
    opened = read_config(run.config)
    assert opened == tiny({"optim.schedule": "constant"})
    check_resumable(opened, run)
    # A config that no run has been made with is another matter.
    elsewhere = run.path.parent / "config.yaml"
    elsewhere.write_text(run.config.read_text())
    with pytest.raises(UsageError, match=r"optim\.decay_ratio is 0\.5, which schedule constant does not read"):
        read_config(elsewhere)


def test_fields_that_differ_are_told_with_both_values(tiny, run):
    assert config_differences(tiny({"trainer.max_steps": 7}), run) == {}
    changes = {"trainer.max_steps": 8, "optim.eps": 1e-6, "model.attention.window": 4, "data.val_fraction": 0.1}
    assert list(config_differences(tiny(changes), run).items()) == [
        ("data.val_fraction", (0.02, 0.1)),
        ("model.attention.window", (None, 4)),
        ("optim.eps", (1e-8, 1e-6)),
        ("trainer.max_steps", (7, 8)),
    ]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"trainer.max_steps": 9, "optim.eps": 1e-6, "trainer.micro_batch_size": 1, "name": "new"}, None),
        (
            {
                "data.cache_dir": "elsewhere",
                "data.stage_to": "/tmp",
                "data.timeout_s": 9.0,
                "data.n_workers": 1,
                "data.verify": "size",
                "data.epochs": 3.0,
            },
            None,
        ),
        ({"data.path": "readmes", "data.n_workers": 1}, "data.path"),
        ({"model.attention.window": 4}, "model.attention.window"),
        ({"trainer.global_batch_size": 2}, "trainer.global_batch_size"),
        (
            {"snapshot.fingerprint.seq_len": 16, "data.data_seed": 1, "init_seed": 0},
            "init_seed, data.data_seed, snapshot.fingerprint.seq_len",
        ),
        ({"init_from": "gpt2"}, "init_from"),
    ],
)
def test_a_resumed_run_keeps_what_would_make_it_another(changes, kept, tiny, run):
    config = tiny(changes)
    if kept is None:
        check_resumable(config, run)
        return
    with pytest.raises(UsageError) as error:
        check_resumable(config, run)
    assert str(error.value) == f"{run.path}: a resumed run keeps its {kept}; start a new run to change them"
