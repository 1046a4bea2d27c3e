"""Snapshots in the training of a LightningModule that is not ours, by a real Trainer."""

import copy
import csv
import json
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

import birthmark
from birthmark.callbacks.snapshot import BiasSnapshot
from birthmark.data.probes import random_probe
from birthmark.errors import UsageError
from birthmark.measure.find_model import find_language_model
from birthmark.measure.hf import HFModel
from birthmark.measure.measurement import birth_reference, measure
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.measure.records import RunDir
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|treespec|tensorboardX|checkpoint directory|`isinstance).*"
)


class Theirs(L.LightningModule):
    """As a user writes it."""

    def __init__(self, net):
        super().__init__()
        self.net, self.losses, self.copies = net, [], {}

    def training_step(self, batch, batch_idx):
        loss = self.net(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.copies[self.global_step] = copy.deepcopy(self.net)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class ByHand(Theirs):
    """With an optimizer for the table and one for the rest."""

    def __init__(self, net):
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.net(input_ids=batch, labels=batch).loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        table = self.net.get_input_embeddings().weight
        parts = [table], [p for p in self.net.parameters() if p is not table]
        return [torch.optim.SGD(part, lr=0.01) for part in parts]


def fit(module, batches, folder, *callbacks, seed=1, validate=False, ckpt=None, **settings):
    torch.manual_seed(seed)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "logger": False, "max_epochs": 1, "log_every_n_steps": 1, **settings},
    )
    data = [DataLoader(part, batch_size=None) for part in ((batches, batches[:1]) if validate else (batches,))]
    trainer.fit(module, *data, ckpt_path=ckpt, weights_only=False)
    return trainer


def steps(folder):
    return [snapshot.step for snapshot in RunDir(folder).snapshots()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_training_is_the_same_bit_for_bit_and_what_is_written_and_logged_is_what_measure_gives(
    llama, token_batches, small_probe, tmp_path, precision
):
    measured, left = Theirs(llama()), Theirs(llama())
    snapshots = BiasSnapshot(config=small_probe, every=2, dirpath=tmp_path / "bias")
    logger = CSVLogger(tmp_path, name="", version="csv")
    fit(measured, token_batches, tmp_path, snapshots, logger=logger, precision=precision)
    state = torch.get_rng_state()
    fit(left, token_batches, tmp_path, precision=precision)
    assert torch.equal(state, torch.get_rng_state())
    assert len(measured.losses) == 5
    assert measured.losses == left.losses
    assert all(torch.equal(a, b) for a, b in zip(measured.parameters(), left.parameters(), strict=True))

    probe = random_probe(61, 10, 8, 0)
    birth = birth_reference(HFModel(llama()), probe, 4)
    with (tmp_path / "csv/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["bias/drift"]]
    logged = {int(row["step"]): row for row in rows}
    written = {snapshot.step: snapshot for snapshot in RunDir(tmp_path / "bias").snapshots()}
    # Five steps are no multiple of two: the last one is the end of the only epoch.
    assert logged.keys() == written.keys() == {0, 2, 4, 5}
    for step in (2, 4, 5):
        # In the precision of the weights, whatever training runs in.
        found = measure(HFModel(measured.copies[step]), probe, birth, batch_size=4).scalars
        assert written[step].bias == found
        for name, value in found.items():
            assert float(logged[step][f"bias/{name}"]) == pytest.approx(value, rel=1e-12), name
    assert snapshots.last.step == 5


def test_steps_are_counted_where_epochs_end_within_an_accumulation(llama, token_batches, small_probe, tmp_path):
    """Three micro-batches, two to a step: an epoch is two steps, its second one of a single micro-batch."""
    snapshots = BiasSnapshot(config=small_probe, every=2, dirpath=tmp_path / "bias")
    trainer = fit(Theirs(llama()), token_batches[:3], tmp_path, snapshots, max_epochs=3, accumulate_grad_batches=2)
    assert trainer.global_step == 6
    assert steps(tmp_path / "bias") == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("every", "more", "expected"),
    [(3, {}, [0, 4, 6, 10]), (5, {}, [0, 6, 10]), (100, {"steps": [3, 7]}, [0, 4, 8, 10])],
)
def test_no_step_is_passed_over_where_a_batch_counts_two(
    llama, token_batches, small_probe, tmp_path, every, more, expected
):
    """Two optimizers by hand: Lightning counts 2, 4, 6, 8 and 10."""
    snapshots = BiasSnapshot(config=replace(small_probe, **more), every=every, dirpath=tmp_path / "bias")
    fit(ByHand(llama()), token_batches, tmp_path, snapshots)
    assert steps(tmp_path / "bias") == expected


def test_a_stop_after_a_validation_has_its_snapshot(llama, token_batches, small_probe, tmp_path):
    snapshots = BiasSnapshot(config=small_probe, every=100, dirpath=tmp_path / "bias")
    stop = EarlyStopping("val_loss", patience=1)
    trainer = fit(
        Theirs(llama()), token_batches, tmp_path, snapshots, stop, validate=True, val_check_interval=2, max_epochs=50
    )
    assert steps(tmp_path / "bias") == [0, trainer.global_step]
    assert trainer.global_step == 4


def test_a_training_that_goes_on_is_compared_with_its_birth(llama, token_batches, small_probe, tmp_path):
    def part(module, folder, **more):
        snapshots = BiasSnapshot(config=small_probe, every=2, dirpath=tmp_path / folder)
        return fit(module, token_batches, tmp_path, snapshots, enable_checkpointing=True, **more)

    first = part(Theirs(llama()), "parts", max_steps=2)
    first.save_checkpoint(tmp_path / "two.ckpt")
    rest, alone = Theirs(llama()), Theirs(llama())
    more = {"ckpt": tmp_path / "two.ckpt", "max_steps": 5, "max_epochs": 9}
    part(rest, "parts", **more)
    part(alone, "alone", **more)
    assert steps(tmp_path / "parts") == [0, 2, 4, 5]
    birth = birth_reference(HFModel(llama()), random_probe(61, 10, 8, 0), 4)
    last = RunDir(tmp_path / "parts").snapshots()[-1]
    found = measure(HFModel(rest.net), random_probe(61, 10, 8, 0), birth, batch_size=4).scalars
    assert last.bias == found
    # Where nothing was taken at birth, nothing is compared with it; the rest is the same.
    assert steps(tmp_path / "alone") == [4, 5]
    late = RunDir(tmp_path / "alone").snapshots()[-1].bias
    assert found.items() > late.items()
    assert not {"alignment", "drift", "rank_persistence"} & late.keys()


class Nested(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside


def test_the_model_is_found_wherever_it_is(llama, token_batches, small_probe, tmp_path):
    for name, net, model in (
        ("own", born(ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=61), 0), None),
        ("nested", Nested(llama()), None),
        ("compiled", torch.compile(llama()), None),
        ("one of two", nn.ModuleList([llama(0), llama(1)]), lambda module: module.model[1]),
    ):
        module = Theirs(None)
        module.model = net
        snapshots = BiasSnapshot(
            config=small_probe, every=1, dirpath=tmp_path / name, **({} if model is None else {"model": model})
        )
        snapshots.on_milestone(L.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False), module, 0)
        wanted = llama(1) if name == "one of two" else llama(0)
        if name != "own":
            assert (
                snapshots.last.bias["entropy"]
                == measure(HFModel(wanted), random_probe(61, 10, 8, 0), batch_size=4).scalars["entropy"]
            )


@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning", "Lora"])
def test_a_model_of_peft_is_found_whole(kind, llama, small_probe, tmp_path):
    """Behind a prompt its model is another one: both callbacks refuse it."""
    peft = pytest.importorskip("peft", reason="the models are its own: pip install peft")
    more = {"target_modules": ["q_proj"]} if kind == "Lora" else {"num_virtual_tokens": 3}
    adapted = peft.get_peft_model(llama(), getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **more))
    found = find_language_model(Theirs(adapted))
    assert found is adapted
    recorder = SnapshotRecorder(tmp_path, small_probe)
    if kind == "Lora":
        assert recorder.take(found, 0).bias["entropy"] > 0
    else:
        with pytest.raises(UsageError, match=r"^this \w+( model is not| cannot be) measured: "):
            recorder.take(found, 0)


def test_what_cannot_be_found_is_refused_with_the_mend(llama, token_batches, small_probe, tmp_path):
    module = Theirs(nn.Linear(2, 2))
    snapshots = BiasSnapshot(config=small_probe, every=1, dirpath=tmp_path)
    with pytest.raises(UsageError, match=r"Theirs holds no model of transformers: say which .*model=lambda module: "):
        fit(module, token_batches, tmp_path, snapshots)
    module.student, module.teacher = llama(), llama()
    with pytest.raises(UsageError, match=r"several models of transformers \(student, teacher\).* module.student, …"):
        fit(module, token_batches, tmp_path, snapshots)
    with pytest.raises(UsageError, match="give dirpath"):
        BiasSnapshot(every=1)
    with pytest.raises(UsageError, match=r"SnapshotConfig is no SnapshotRecorder; .*BiasSnapshot\(config=…, dirpath=…"):
        BiasSnapshot(small_probe, every=1, dirpath=tmp_path)
    with pytest.raises(UsageError, match="give dirpath, init_seed to the SnapshotRecorder"):
        BiasSnapshot(SnapshotRecorder(tmp_path), every=1, dirpath=tmp_path, init_seed=3)
    with pytest.raises(UsageError, match=r"no argument run; give dirpath=run\.path"):
        BiasSnapshot(every=1, run=RunDir(tmp_path))


def test_the_folder_may_be_the_first_argument(llama, token_batches, small_probe, tmp_path):
    for name, form in (
        ("path", BiasSnapshot(tmp_path / "path", every=5, config=small_probe)),
        ("text", birthmark.BiasSnapshot(str(tmp_path / "text"), every=5, config=small_probe)),
        ("named", BiasSnapshot(dirpath=tmp_path / "named", every=5, config=small_probe)),
        ("recorder", BiasSnapshot(SnapshotRecorder(tmp_path / "recorder", small_probe), every=5)),
    ):
        fit(Theirs(llama()), token_batches, tmp_path, form)
        assert steps(tmp_path / name) == [0, 5]
    with pytest.raises(UsageError, match="BiasSnapshot: the folder is a and, by dirpath, b; give one of them"):
        BiasSnapshot("a", every=1, dirpath="b")


@pytest.mark.heavy
def test_the_five_lines_in_the_docs_run(llama, token_batches, tmp_path, monkeypatch):
    page = (Path(birthmark.__file__).parent / "docs" / "python.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) == 5
    monkeypatch.chdir(tmp_path)
    module = Theirs(llama())
    scope = {"module": module, "batches": DataLoader(token_batches, batch_size=None)}
    exec(code, scope)
    assert steps(tmp_path / "bias") == [0, 5]
    first, last = RunDir(tmp_path / "bias").snapshots()
    assert first.bias["drift"] == pytest.approx(1)
    assert last.bias["drift"] < 0.999
    assert last.bias.keys() == {name.removeprefix("bias/") for name in scope["snapshots"].last.scalars()}


SCRIPT = """
import json, os, sys
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ |= {
    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test",
}
import lightning as L
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.callbacks.snapshot import BiasSnapshot

dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.net = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=12)
        )

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

module = Module()
snapshots = BiasSnapshot(
    SnapshotRecorder(store + "-bias", SnapshotConfig(n_sequences=9, seq_len=8, batch_size=2)), every=2
)
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=3, callbacks=[snapshots], enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False, use_distributed_sampler=False,
    logger=CSVLogger(store + "-csv", name="", version=str(rank)),
)
batches = torch.randint(0, 61, (3, 2, 12), generator=torch.Generator().manual_seed(rank))
trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
torch.save(module.net.state_dict(), out + ".pt")
recorder = SnapshotRecorder(store + "-bias", snapshots.recorder.config)
results = {"last": snapshots.last.bias, "again": recorder.take(module.net, 3).bias}
for block in module.net.transformer.h:
    fully_shard(block)
fully_shard(module.net)
results["sharded"] = SnapshotRecorder(store + "-bias", recorder.config).take(module.net, 4).bias
results["whole"] = [name for name, p in module.net.named_parameters() if not isinstance(p, DTensor)]
with open(out, "w") as file:
    json.dump(results, file)
"""


def test_two_ranks_of_a_real_trainer_take_one_snapshot_together(two_ranks, tmp_path):
    outs = two_ranks(SCRIPT, ".json")
    a, b = (json.loads(file.read_text()) for file in outs)
    assert a == b
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=12)
    torch.manual_seed(5)
    model, probe = HFModel(transformers.GPT2LMHeadModel(config)), random_probe(61, 9, 8, 0)
    birth = birth_reference(model, probe, 9)
    model.model.load_state_dict(torch.load(f"{outs[1]}.pt"))
    assert a["last"] == pytest.approx(measure(model, probe, birth).scalars, rel=1e-5, abs=1e-7)
    # What was stored at birth is the same for all.
    assert a["again"] == a["last"]
    # FSDP2 shards the same weights over both: they are read a block at a time, and are shards again after that.
    assert a["sharded"] == pytest.approx(a["again"], rel=1e-5, abs=1e-7)
    assert a["whole"] == []
    assert steps(tmp_path / "store-bias") == [0, 2, 3, 4]
    # Rank 0 alone logs.
    files = sorted(file.parent.name for file in (tmp_path / "store-csv").rglob("metrics.csv"))
    assert files == ["0"]
