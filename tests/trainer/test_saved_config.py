"""What a config changes of a run on disk, and which of it a resumed run may not."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import yaml

from birthmark.errors import UsageError
from birthmark.measure.records import RunDir
from birthmark.trainer.run_folder import check_resumable
from birthmark.trainer.saved_config import config_differences


@pytest.fixture
def run(tiny, tmp_path):
    """A run whose config was stored before two fields were thought of."""
    config = asdict(tiny({"trainer.max_steps": 7}))
    del config["model"]["attention"]["window"], config["optim"]["eps"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return RunDir(tmp_path)


def test_fields_that_differ_are_told_with_both_values(tiny, run):
    assert config_differences(tiny({"trainer.max_steps": 7}), run) == {}
    changes = {"trainer.max_steps": 8, "optim.eps": 1e-6, "model.attention.window": 4, "data.text_field": "body"}
    assert list(config_differences(tiny(changes), run).items()) == [
        ("data.text_field", ("text", "body")),
        ("model.attention.window", (None, 4)),
        ("optim.eps", (1e-8, 1e-6)),
        ("trainer.max_steps", (7, 8)),
    ]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"trainer.max_steps": 9, "optim.eps": 1e-6, "trainer.micro_batch_size": 1, "name": "new"}, None),
        ({"model.attention.window": 4}, "model"),
        ({"trainer.global_batch_size": 2}, "trainer.global_batch_size"),
        ({"snapshot.fingerprint.seq_len": 16, "data.data_seed": 1, "init_seed": 0}, "init_seed, data, snapshot"),
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
