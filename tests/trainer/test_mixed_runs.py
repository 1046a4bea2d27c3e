"""Runs on several sources: shares, losses of each, limits."""

import io
from dataclasses import replace

import pytest
import torch
from quiet_runs import logged, run
from rich.console import Console

from birthmark.data.config import DataConfig, SourceConfig, WeightChange
from birthmark.data.prepare import prepare
from birthmark.errors import UsageError
from birthmark.measure.records import RunDir
from birthmark.models.birth import born
from birthmark.trainer.config_file import read_config
from birthmark.trainer.run import pretrain


@pytest.fixture
def mixed(tiny, tmp_path):
    """A run on two sources, of which the second has a third of the weight of the first."""
    for name, text in (("prose", "the seed decides "), ("code", "def f ( x ) : ")):
        (tmp_path / name).mkdir()
        for i in range(6):
            (tmp_path / name / f"{i}.txt").write_text(text * 30)
    sources = [SourceConfig(str(tmp_path / name), weight) for name, weight in (("prose", 3.0), ("code", 1.0))]
    data = DataConfig(sources=sources, val_fraction=0.3, cache_dir=str(tmp_path / "cache"))
    return replace(tiny({"model.vocab_size": 280, "snapshot.enabled": False}), data=data)


def test_every_source_has_its_share_and_its_own_validation_loss(mixed, tmp_path):
    said = io.StringIO()
    done = pretrain(mixed, RunDir(tmp_path / "run"), console=Console(file=said, width=200)).run
    assert "sources: prose 75.0% (" in said.getvalue()
    assert "weights add up to 4, and each is taken relative to that" in said.getvalue()
    whole, prose, code = (logged(done, f"val/loss{name}") for name in ("", "/prose", "/code"))
    assert whole[6] == pytest.approx(0.75 * prose[6] + 0.25 * code[6])
    data = prepare(mixed.data, vocab_size=280, seq_len=12)
    batch = torch.from_numpy(data.val.batch(0, 6)[1::2])
    log_p = born(read_config(done.config).model, 3)(batch[:, :-1]).double().log_softmax(-1)
    assert code[0] == pytest.approx(-log_p.gather(-1, batch[:, 1:, None]).mean().item(), rel=1e-6)
    tokens = [logged(done, f"train/tokens{name}")[6] for name in ("", "/prose", "/code")]
    assert tokens == [6 * 4 * 12, 0.75 * 6 * 4 * 12, 0.25 * 6 * 4 * 12]


def test_shares_change_at_their_step(mixed, tmp_path):
    schedule = [WeightChange(3, {"code": 1.0})]
    changed = replace(mixed, data=replace(mixed.data, schedule=schedule), trainer=replace(mixed.trainer, log_every=3))
    said = io.StringIO()
    done = pretrain(changed, RunDir(tmp_path / "run"), console=Console(file=said, width=200)).run
    assert "; after step 3 code 100.0%" in said.getvalue()
    assert read_config(done.config).data == changed.data
    # Twelve samples of twelve tokens in three steps.
    assert logged(done, "train/tokens/prose") == {3: 9 * 12, 6: 9 * 12}
    assert logged(done, "train/tokens/code") == {3: 3 * 12, 6: 15 * 12}
    with pytest.raises(UsageError, match=r"^data\.schedule\[0\]\.step is 3, where the run is over"):
        replace(changed, trainer=replace(changed.trainer, max_steps=3))


def test_a_run_that_would_read_a_source_too_often_does_not_start(mixed, tmp_path):
    often = replace(mixed, data=replace(mixed.data, epochs=0.01))
    with pytest.raises(UsageError, match=r"data\.epochs is 0\.01, but the run would read prose"):
        run(often, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=r"trainer\.val_sequences is 1, fewer than the 2 of data\.sources"):
        replace(mixed, trainer=replace(mixed.trainer, val_sequences=1))
