"""Snapshots in trainings by the real Trainer of transformers."""

import copy
import dataclasses
import pickle
import re
import subprocess
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

import birthmark
from birthmark.callbacks.snapshot import BiasSnapshot
from birthmark.callbacks.transformers_trainer import TrainerSnapshot, bias_callback
from birthmark.data.probes import random_probe
from birthmark.errors import UsageError
from birthmark.measure.hf import HFModel
from birthmark.measure.measurement import birth_reference, measure
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.measure.records import RunDir

transformers.logging.set_verbosity_error()

PROBE = random_probe(61, 10, 8, 0)


class Tokens(Dataset):
    """Rows of token ids, as a language model of transformers is trained on them."""

    def __init__(self, batches):
        self.rows = batches.flatten(0, 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Copies(transformers.TrainerCallback):
    """Keeps the model of every step."""

    def __init__(self):
        self.models = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.models[state.global_step] = copy.deepcopy(model.state_dict())


@pytest.fixture
def arguments(tmp_path):
    def build(**more):
        settings = {
            "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4, "num_train_epochs": 1,
            "learning_rate": 0.01, "use_cpu": True, "seed": 3, "report_to": [], "disable_tqdm": True,
            "logging_steps": 1, "save_strategy": "no",
        }  # fmt: skip
        return transformers.TrainingArguments(**settings | more)

    return build


def logged(trainer, key):
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


@pytest.mark.parametrize("bf16", [False, True])
def test_the_training_is_the_same_bit_for_bit_with_and_without(
    llama, token_batches, small_probe, arguments, tmp_path, bf16
):
    def train(model, *callbacks):
        trainer = transformers.Trainer(model, arguments(bf16=bf16), train_dataset=Tokens(token_batches))
        for make in callbacks:
            trainer.add_callback(make(trainer))
        trainer.train()
        return trainer, torch.get_rng_state()

    recorder, copies = SnapshotRecorder(tmp_path / "bias", small_probe), Copies()
    measured, left = llama(), llama()
    with_it, state = train(measured, lambda trainer: copies, lambda trainer: bias_callback(trainer, recorder, every=2))
    without, same = train(left)
    assert torch.equal(state, same)
    for key in ("loss", "grad_norm", "learning_rate"):
        assert len(logged(with_it, key)) == 5
        assert logged(with_it, key) == logged(without, key)
    assert all(torch.equal(a, b) for a, b in zip(measured.parameters(), left.parameters(), strict=True))
    assert [sorted(vars(m)) for m in measured.modules()] == [sorted(vars(m)) for m in left.modules()]

    birth = birth_reference(HFModel(llama()), PROBE, 4)
    written = {snapshot.step: snapshot.bias for snapshot in RunDir(tmp_path / "bias").snapshots()}
    assert list(written) == [0, 2, 4, 5]
    for step in (2, 4, 5):
        # In the precision of the weights: under the trainer's autocast the figures would differ in the third digit.
        model = llama()
        model.load_state_dict(copies.models[step])
        found = measure(HFModel(model), PROBE, birth, batch_size=4).scalars
        assert written[step] == found
        assert {name: logged(with_it, f"bias/{name}")[step] for name in found} == found
    assert logged(with_it, "bias/drift").keys() == written.keys()


def test_a_training_that_goes_on_is_compared_with_its_birth(llama, token_batches, small_probe, arguments, tmp_path):
    def train(**more):
        settings = arguments(save_strategy="steps", save_steps=2, **more)
        trainer = transformers.Trainer(llama(), settings, train_dataset=Tokens(token_batches))
        trainer.add_callback(bias_callback(trainer, SnapshotRecorder(tmp_path / "bias", small_probe), every=2))
        trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2") if more else None)
        return trainer

    train()
    whole = RunDir(tmp_path / "bias").snapshots()
    again = train(num_train_epochs=2)
    parts = RunDir(tmp_path / "bias").snapshots()
    assert [snapshot.step for snapshot in parts] == [0, 2, 4, 5, 6, 8, 10]
    assert parts[0].bias == whole[0].bias
    birth = birth_reference(HFModel(llama()), PROBE, 4)
    assert parts[-1].bias == measure(HFModel(again.model), PROBE, birth, batch_size=4).scalars


class Stop(transformers.TrainerCallback):
    """Ends the training after the evaluation of step 3, as early stopping does."""

    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


@pytest.mark.parametrize("best", [False, True])
def test_a_stop_after_an_evaluation_has_its_snapshot(llama, token_batches, small_probe, arguments, tmp_path, best):
    data, copies = Tokens(token_batches), Copies()
    settings = arguments(
        eval_strategy="steps", eval_steps=1, save_strategy="steps" if best else "no", save_steps=1,
        load_best_model_at_end=best, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    trainer = transformers.Trainer(llama(), settings, train_dataset=data, eval_dataset=data, callbacks=[Stop(), copies])
    trainer.add_callback(bias_callback(trainer, SnapshotRecorder(tmp_path / "bias", small_probe), every=100))
    trainer.train()
    first, last = RunDir(tmp_path / "bias").snapshots()
    assert (first.step, last.step) == (0, 3)
    # Also where the weights of another step are loaded at the end: here the worst ones, of step 1.
    model = llama()
    model.load_state_dict(copies.models[3])
    assert last.bias["entropy"] == measure(HFModel(model), PROBE, batch_size=4).scalars["entropy"]


def test_a_model_that_cannot_be_measured_is_trained_to_the_end_as_without_the_callback(
    llama, token_batches, small_probe, arguments, tmp_path
):
    """An attention that is another one, in bf16: named once, noted for each step, and the losses are the same."""

    def halved(module, query, key, value, attention_mask, **more):
        sdpa = transformers.AttentionInterface()["sdpa"]
        return sdpa(module, 0.5 * query, key, value, attention_mask, **more)

    transformers.AttentionInterface.register("halved", halved)

    def train(recorder=None):
        model = llama().to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4 if parameter.ndim > 1 else 1)
        model.config._attn_implementation = "halved"
        trainer = transformers.Trainer(model, arguments(), train_dataset=Tokens(token_batches))
        if recorder is not None:
            trainer.add_callback(bias_callback(trainer, recorder, every=2))
        trainer.train()
        return logged(trainer, "loss")

    with pytest.warns(UserWarning, match="llama model's attention is not what it should be") as said:
        losses = train(SnapshotRecorder(tmp_path / "bias", small_probe))
    assert losses == train()
    assert len([warning for warning in said if "not what it should be" in str(warning.message)]) == 1
    assert list(RunDir(tmp_path / "bias").read_not_measured()) == [0, 2, 4, 5]
    raises = dataclasses.replace(small_probe, on_error="raise")
    with pytest.raises(UsageError, match="not what it should be"):
        train(SnapshotRecorder(tmp_path / "raises", raises))


class Shown(transformers.TrainerCallback):
    """Keeps all that a report is given, as those for W&B and TensorBoard are."""

    def __init__(self):
        self.rows = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.setdefault(state.global_step, {}).update(logs)


def test_a_callback_that_is_made_before_its_trainer_does_the_same(
    their_config, word_tokenizer, token_batches, small_probe, arguments, tmp_path
):
    """Snapshots, log and reports equal those of the callback that knows its trainer, whose training goes on alike."""
    text = tmp_path / "notes.txt"
    text.write_text("the cat sat on the mat and the dog sat too " * 60)
    small = dataclasses.replace(small_probe, n_sequences=4)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(word_tokenizer.content.decode()))

    def train(shown, *callbacks):
        config = their_config("llama")
        config.vocab_size = 270
        torch.manual_seed(0)
        return transformers.Trainer(
            transformers.LlamaForCausalLM(config), arguments(), train_dataset=Tokens(token_batches),
            processing_class=tokenizer, data_collator=transformers.default_data_collator, callbacks=[shown, *callbacks],
        )  # fmt: skip

    early, late = Shown(), Shown()
    callback = birthmark.TrainerSnapshot(tmp_path / "early", every=2, config=small, text=str(text))
    assert isinstance(callback, transformers.TrainerCallback)
    trainer = train(early, callback)
    trainer.train()
    other = train(late)
    other.add_callback(bias_callback(other, SnapshotRecorder(tmp_path / "late", small, text=str(text)), every=2))
    other.train()
    assert logged(trainer, "bias/drift").keys() == {0, 2, 4, 5}
    assert "bias_text/sink_mass" in early.rows[5]
    for step in range(6):
        assert without_times(early.rows[step]) == without_times(late.rows[step])
    assert logged(trainer, "loss") == logged(other, "loss")
    for snapshot, same in zip(*(RunDir(tmp_path / name).snapshots() for name in ("early", "late")), strict=True):
        assert snapshot.bias == same.bias
    loaded = pickle.loads(pickle.dumps(callback))
    assert isinstance(loaded, TrainerSnapshot)
    assert isinstance(loaded, transformers.TrainerCallback)
    # Trainers hold their models.
    assert (loaded.every, loaded.trainer, callback.trainer) == (2, None, None)
    # It can be taken out again by its class, and serves another trainer.
    assert trainer.pop_callback(TrainerSnapshot) is callback
    again = train(Shown(), callback)
    with pytest.warns(UserWarning, match="snapshots of an earlier training"):
        again.train()
    assert logged(again, "bias/drift").keys() == {0, 2, 4, 5}


def without_times(row):
    return {name: value for name, value in row.items() if "runtime" not in name and "per_second" not in name}


def test_a_loop_without_a_trainer_has_the_scalars_in_its_history(llama, small_probe, arguments, tmp_path):
    model = llama()
    callback = TrainerSnapshot(dirpath=tmp_path / "bias", every=2, config=small_probe)
    handler = CallbackHandler([DefaultFlowCallback(), callback], model, None, None, None)
    state = transformers.TrainerState(max_steps=2)
    handler.on_train_begin(arguments(), state, transformers.TrainerControl())
    (row,) = state.log_history
    assert row["step"] == 0
    assert row["bias/drift"] == pytest.approx(1)


def test_impossible_arguments_are_named(tmp_path):
    for every in (0, 2.5, "500", None, True):
        for kind in (TrainerSnapshot, BiasSnapshot):
            expected = re.escape(f"{kind.__name__}: every is {every!r}; give a whole number of steps, at least 1")
            with pytest.raises(UsageError, match=f"^{expected}$"):
                kind(tmp_path, every=every)
    with pytest.raises(UsageError, match="TrainerSnapshot: give dirpath, the folder"):
        TrainerSnapshot(every=1)
    with pytest.raises(UsageError, match="TrainerSnapshot: the folder is a and, by dirpath, b; give one of them"):
        TrainerSnapshot("a", every=1, dirpath="b")
    with pytest.raises(
        UsageError, match="TrainerSnapshot: there is no argument text_probe; give one of config, probes"
    ):
        TrainerSnapshot(tmp_path, every=1, text_probe="notes")
    with pytest.raises(UsageError, match="TrainerSnapshot: give text to the SnapshotRecorder"):
        TrainerSnapshot(SnapshotRecorder(tmp_path), every=1, text="notes")


def test_without_transformers_the_class_says_what_is_missing(tmp_path, python):
    """And only where a callback is made: its name is one of ``from birthmark import *``."""
    code = f"""
import sys
import birthmark as bm
assert "birthmark.callbacks.transformers_trainer" not in sys.modules
sys.modules["transformers"] = None
bm.TrainerSnapshot
try:
    bm.TrainerSnapshot({str(tmp_path)!r}, every=1)
except bm.UsageError as error:
    assert "pip install transformers" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([python, "-c", code], check=True)


def test_text_is_read_by_the_trainers_own_tokenizer(llama, word_tokenizer, arguments, small_probe, tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(word_tokenizer.content.decode()))
    trainer = transformers.Trainer(model=llama(), args=arguments(), processing_class=tokenizer)
    with_text = SnapshotRecorder(tmp_path / "bias", small_probe, text="notes")
    bias_callback(trainer, with_text, every=1)
    assert with_text.tokenizer is tokenizer
    # In each of its trainings.
    callback = TrainerSnapshot(tmp_path / "bias", every=1, text="notes")
    for its in (tokenizer, copy.deepcopy(tokenizer)):
        callback.read_text_by(its)
        assert callback.recorder.tokenizer is its
    without = SnapshotRecorder(tmp_path / "bias", small_probe)
    bias_callback(trainer, without, every=1)
    assert without.tokenizer is None
    with pytest.raises(UsageError, match="every is 0; give a whole number"):
        bias_callback(trainer, without, every=0)


class Gathers(transformers.Trainer):
    """Averages a figure of its steps into the next row that it logs, as the trainers of trl do."""

    def compute_loss(self, *args, **kwargs):
        self.seen = [*getattr(self, "seen", ()), self.state.global_step]
        return super().compute_loss(*args, **kwargs)

    def log(self, logs, *args, **kwargs):
        super().log(logs | {"seen": len(self.seen)}, *args, **kwargs)
        self.seen = []


def test_what_a_trainer_gathers_for_its_rows_stays_there(llama, token_batches, small_probe, arguments, tmp_path):
    def rows(*callbacks):
        settings, data = arguments(logging_steps=2), Tokens(token_batches)
        trainer = Gathers(llama(), settings, train_dataset=data, callbacks=[*callbacks])
        trainer.train()
        return [row for row in trainer.state.log_history if "loss" in row]

    assert rows(TrainerSnapshot(tmp_path / "bias", every=1, config=small_probe)) == rows()


@pytest.mark.slow
def test_the_trainer_of_trl(tmp_path):
    """Tried with trl 1.16: text in rows, its own tokenizer, its figures and the snapshots' side by side."""
    trl = pytest.importorskip("trl", reason="trl is no dependency: pip install trl")
    text = Path(transformers.__file__).parent / "trainer.py"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train([str(text)], trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<s>")
    rows = [line for line in text.read_text().splitlines() if len(line) > 20][:80]

    def train(*callbacks):
        transformers.set_seed(0)
        sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(tokenizer), **sizes))
        settings = trl.SFTConfig(
            output_dir=str(tmp_path / "out"), max_steps=10, per_device_train_batch_size=4, max_length=32, use_cpu=True,
            bf16=False, report_to="none", save_strategy="no", logging_steps=5, disable_tqdm=True, packing=True,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model,
            settings,
            train_dataset=datasets.Dataset.from_dict({"text": rows}),
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
        trainer.train()
        return trainer

    with pytest.warns(UserWarning, match="64 positions, and this model 32: it is shortened"):
        measured = train(TrainerSnapshot(tmp_path / "bias", every=5, text=str(text)))
    left = train()
    assert logged(measured, "bias_text/sink_mass").keys() == {0, 5, 10}
    for key in ("loss", "mean_token_accuracy", "entropy", "num_tokens"):
        assert logged(measured, key) == logged(left, key)
        assert logged(left, key).keys() == {5, 10}
    pairs = zip(measured.model.parameters(), left.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_loop_of_accelerate_is_measured_in_the_precision_of_the_weights(
    accelerator, llama, token_batches, small_probe, tmp_path
):
    """Its prepared model runs under autocast. On several processes it is in DistributedDataParallel besides."""
    bare, recorder = llama(), SnapshotRecorder(tmp_path / "bias", small_probe)
    model, optimizer = accelerator.prepare(llama(), torch.optim.SGD(llama().parameters()))
    assert optimizer is not None
    found = recorder.take(model, 0).bias
    birth = birth_reference(HFModel(bare), PROBE, 4)
    assert found == measure(HFModel(bare), PROBE, birth, batch_size=4).scalars
    batch = token_batches[0]
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    recorder.take(model, 1)
    assert [snapshot.step for snapshot in recorder.run.snapshots()] == [0, 1]


@pytest.mark.heavy
def test_the_lines_in_the_docs_run(llama, token_batches, arguments, tmp_path, monkeypatch):
    page = (Path(birthmark.__file__).parent / "docs/python.md").read_text()
    section = page.split("## The Trainer of transformers")[1].split("\n## ")[0]
    (code,) = [block.split("```")[0] for block in section.split("```python\n")[1:] if "TrainerSnapshot" in block]
    monkeypatch.chdir(tmp_path)
    scope = {"model": llama(), "arguments": arguments(), "dataset": Tokens(token_batches)}
    exec(code, scope)
    assert [snapshot.step for snapshot in RunDir(tmp_path / "bias").snapshots()] == [0, 5]
    assert logged(scope["trainer"], "bias/drift").keys() == {0, 5}
