"""A small run on text, of which studies of lineage are made."""

import numpy as np
import pytest
import yaml

_BASE = {
    "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 300, "max_seq_len": 16, "mlp": "swiglu"},
    "optim": {"lr": 0.001, "warmup_steps": 2},
    "trainer": {
        "max_steps": 20, "micro_batch_size": 8, "global_batch_size": 8, "checkpoint_every": 10, "log_every": 10,
        "val_sequences": 8, "device": "cpu",
    },
    "snapshot": {"enabled": False},
    "log": {"wandb": "off"},
}  # fmt: skip


@pytest.fixture(scope="session")
def lineage_base():
    """``lineage_base(folder, changes=None)``: its config, ``base.yaml``, and two texts, ``corpus`` and ``other``."""

    def write(folder, changes=None):
        rng = np.random.default_rng(0)
        for name, words in (
            ("corpus", "seed birth token a model likes the sink norm of it never"),
            ("other", "rain on river stone cold bridge under night walks she slowly home"),
        ):
            lines = (" ".join(rng.choice(words.split(), 12)) + "." for _ in range(400))
            (folder / f"{name}.txt").write_text("\n\n".join(lines))
        data = {"path": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")}
        (folder / "base.yaml").write_text(yaml.safe_dump(_BASE | {"data": data} | (changes or {})))
        return folder / "base.yaml"

    return write
