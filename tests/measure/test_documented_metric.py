"""The metric of docs/extending.md, in a real run: measured and logged as ours are; pages: test_declared."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import Seen

import birthmark
from birthmark.data.probes import random_probe
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.models.birth import born
from birthmark.trainer.run import pretrain


@pytest.fixture(scope="module")
def code():
    """The example."""
    page = (Path(birthmark.__file__).parent / "docs/extending.md").read_text()
    section = page.split("## A metric of your own")[1].split("\n## ")[0]
    (block,) = [block.split("```")[0] for block in section.split("```python\n")[1:]]
    return block


@pytest.fixture(scope="module")
def run(code, tiny, tmp_path_factory, no_page):
    """A run of two steps with it, logged to W&B offline."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "value_norm.py").write_text(code)
    fields = {"snapshot.metrics": ["value_norm:ValueNorm"], "snapshot.probes": ["random", "text"]}
    fields |= {"log.wandb": "offline", "trainer.max_steps": 2}
    with pytest.MonkeyPatch.context() as patch, no_page():
        patch.chdir(folder)
        patch.delitem(sys.modules, "value_norm", raising=False)
        pretrain(tiny(fields), RunDir(folder / "run"))
    return RunDir(folder / "run")


def test_it_is_in_every_snapshot(run, tiny):
    config = tiny()
    first, last = run.snapshots()
    with torch.no_grad():
        born(config.model, 3)(torch.from_numpy(random_probe(24, 10, 8, 0)), observer=(seen := Seen()))
    norms = torch.stack([attended.v_BHTK.double().norm(dim=-1).mean(0) for attended in seen.attended.values()])
    np.testing.assert_allclose(first.arrays["value_norm"], norms[..., 0] / norms[..., 1:].mean(-1), rtol=1e-5)
    for snapshot in (first, last):
        assert snapshot.bias["value_norm"] == pytest.approx(snapshot.arrays["value_norm"].mean())
        assert snapshot.summary["bias_text"]["value_norm"] == pytest.approx(snapshot.arrays["text.value_norm"].mean())
        assert snapshot.quantities["value_norm"].label == "value norm"


def test_it_is_logged_like_ours(run, offline_wandb):
    lines = [line for line in read_metrics(run.metrics) if "bias/value_norm" in line]
    assert [line["step"] for line in lines] == [0, 2]
    assert [line["bias/value_norm"] for line in lines] == [s.bias["value_norm"] for s in run.snapshots()]
    (start,) = offline_wandb(run.path)
    merged = start.logged
    last = run.snapshots()[-1]
    assert merged["bias/value_norm"] == merged["sink/value_norm"] == last.bias["value_norm"]
    assert merged["bias_text/value_norm"] == merged["sink/value_norm on text"]
    assert merged["sink/value_norm (no difference)"] == 1
    assert merged["bias/value_norm_by_head/_type"] == merged["bias/sink_mass_by_head/_type"] == "table-file"
    assert merged["sink/sink_mass (uniform)"] == last.bias["sink_uniform"]
