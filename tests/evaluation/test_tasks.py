"""Tasks of lm-eval scored on our decoder, against lm-eval's own ``hf`` on the exported model; and what is refused."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from quiet_runs import run

from birthmark.errors import UsageError
from birthmark.evaluation.config import EvalConfig
from birthmark.evaluation.tasks import Tasks
from birthmark.measure.metrics_log import read_metrics
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.heavy

WORDS = ["hello", "world", "some", "other", "text", "here"]


def _documents():
    draw = random.Random(3)

    def words(n):
        return " ".join(draw.choices(WORDS, k=n))

    for i in range(9):
        choices = [f" {words(1 + j % 3)}" for j in range(3)]
        # One is longer than the model reads, and one ends with a space.
        question = words(40) if i == 1 else f"{words(3)} " if i == 2 else words(4)
        yield {"q": question, "choices": choices, "answer": i % 3, "text": words(2 + 9 * i), "last": f" {words(2)}"}


def _task(name, data, **more):
    files = {"test": str(data), "train": str(data)}
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "fewshot_split": "train",
        "doc_to_text": "{{q}}",
        "metadata": {"version": 1.0},
        **more,
    }


def _metrics(*names, **how):
    return {"metric_list": [{"metric": name, "aggregation": how.get(name, "mean")} for name in names]}


def _written(**settings):
    return {**_metrics("exact_match"), "generation_kwargs": {"max_gen_toks": 9, **settings}}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Where datasets keeps what it has read."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Name → the YAML file of a task on local documents."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in _documents()))
    choice = {"output_type": "multiple_choice", "doc_to_target": "answer", "doc_to_choice": "choices"}
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    tasks = [
        _task("choose", data, **choice, **_metrics("acc", "acc_norm")),
        _task("read", data, **rolling, **_metrics("bits_per_byte", bits_per_byte="bits_per_byte")),
        _task("last", data, output_type="loglikelihood", doc_to_target="{{last}}", **_metrics("acc")),
        _task("write", data, output_type="generate_until", doc_to_target="{{last}}", **_written(until=["ڃ", "J"])),
        _task("draw", data, output_type="generate_until", doc_to_target="{{last}}", **_written(temperature=0.7)),
        _task("beams", data, output_type="generate_until", doc_to_target="{{last}}", **_written(num_beams=2)),
        _task("see", data, output_type="generate_until", doc_to_target="{{last}}", doc_to_image="q", **_written()),
        _task("gone", folder / "none.jsonl", **choice, **_metrics("acc")),
        {**_task("far", data, **choice, **_metrics("acc")), "dataset_path": "nobody/nothing", "dataset_kwargs": {}},
        {**_task("choose", data, **choice, **_metrics("acc")), "doc_to_text": "again {{q}}"},
    ]
    found = {}
    names = ["choose", "read", "last", "write", "draw", "beams", "see", "gone", "far", "again"]
    for name, task in zip(names, tasks, strict=True):
        found[name] = str(folder / f"{name}.yaml")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    (folder / "broken.yaml").write_text("task: [")
    (folder / "empty.yaml").write_text("a: 1")
    return {**found, "broken": str(folder / "broken.yaml"), "empty": str(folder / "empty.yaml")}


@pytest.fixture(scope="module")
def model(enliven):
    shape = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=272, max_seq_len=20)
    return enliven(born(replace(shape, norm="rmsnorm", mlp="swiglu"), 0))


def test_scores_are_those_of_lm_eval_on_the_exported_model(files, model, word_tokenizer, tmp_path, monkeypatch):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # asks every tool for its version
    asked = [files[name] for name in ("choose", "read", "last", "write")]
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    tasks = Tasks.load(EvalConfig(tasks=asked, n_docs=7, n_shot=2))
    assert tasks.titles == [f"{name} (7 documents)" for name in ("choose", "read", "last", "write")]
    ours = tasks.results(model, word_tokenizer, 20, 4)
    scores = tasks.scores(model, word_tokenizer, 20, 3)
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])

    (tmp_path / "tokenizer.json").write_bytes(word_tokenizer.content)
    end = word_tokenizer.end_of_text
    save_pretrained(model, tmp_path / "out", tokenizer_file=tmp_path / "tokenizer.json", eos_token_id=end)
    exported = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(tmp_path / "out"),
        batch_size=2,
        device="cpu",
    )
    manager = TaskManager(include_defaults=False)
    theirs = evaluator.simple_evaluate(exported, tasks=asked, num_fewshot=2, limit=7, task_manager=manager)
    written = []
    for name in ("choose", "read", "last", "write"):
        assert len(ours["samples"][name]) == 7
        for mine, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert mine["arguments"] == other["arguments"]
            if name == "write":
                assert mine["resps"] == other["resps"]
                written.append(len(mine["resps"][0][0].encode()))
                continue
            found, expected = np.array(mine["resps"], dtype=float), np.array(other["resps"], dtype=float)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        for key, value in theirs["results"][name].items():
            if key in ("alias", "name", "sample_len") or value == "N/A":
                continue
            assert scores[f"eval/{name}/{key.removesuffix(',none')}"] == pytest.approx(value, rel=1e-4)
    # Some texts end at a stop, and others at the most tokens.
    assert min(written) < 6 < max(written)
    assert scores["eval/choose/chance"] == pytest.approx(1 / 3)
    assert scores.keys() == {
        "eval/choose/acc", "eval/choose/acc_norm", "eval/choose/acc_stderr", "eval/choose/acc_norm_stderr",
        "eval/choose/chance", "eval/read/bits_per_byte", "eval/last/acc", "eval/last/acc_stderr",
        "eval/write/exact_match", "eval/write/exact_match_stderr",
    }  # fmt: skip
    # The same examples and documents every time.
    again = tasks.results(model, word_tokenizer, 20, 4)
    assert [s["arguments"] for s in again["samples"]["choose"]] == [s["arguments"] for s in ours["samples"]["choose"]]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("draw", "it draws what it writes, which is not the same twice"),
        ("see", "it has pictures or sound"),
        ("beams", "generation_kwargs has num_beams"),
        ("gone", "its documents are missing"),
        ("far", "its documents are on the Hugging Face hub, not in the cache here, and it cannot be reached"),
        ("broken", "lm-eval cannot read it"),
        ("empty", "lm-eval cannot read it"),
        ("/none.yaml", "there is no such file"),
    ],
)
def test_tasks_that_cannot_be_scored_are_refused_in_a_line(files, name, line):
    with pytest.raises(UsageError, match=line) as error:
        Tasks.load(EvalConfig(tasks=[files.get(name, name)]))
    assert "\n" not in str(error.value)


def test_more_text_than_the_model_reads_is_refused(files):
    tasks = Tasks.load(EvalConfig(tasks=[files["write"]]))
    tasks.check_lengths(10)
    with pytest.raises(UsageError, match=r"write lets a model write 9 tokens, and model.max_seq_len is 9: give its"):
        tasks.check_lengths(9)


def test_two_of_one_name_are_refused(files):
    with pytest.raises(UsageError, match="has a choose too"):
        Tasks.load(EvalConfig(tasks=[files["choose"], files["again"]]))
    with pytest.raises(UsageError, match=r"eval.texts has a choose too"):
        Tasks.load(EvalConfig(tasks=[files["choose"]], texts=["folder/choose.txt"]))


@pytest.mark.slow
def test_a_name_that_lm_eval_does_not_know_is_refused():
    with pytest.raises(UsageError, match="lm-eval has no such task"):
        Tasks.load(EvalConfig(tasks=["arc_eazy"]))


def test_lm_eval_that_is_missing_is_named_with_its_install_line(tiny, files, tmp_path, monkeypatch):
    monkeypatch.setattr("birthmark.evaluation.tasks.importlib.util.find_spec", lambda name: None)
    config = tiny({"data.path": "stdlib", "eval.tasks": [files["choose"]]})
    with pytest.raises(UsageError, match=r"pip install lm-eval"):
        run(config, tmp_path / "run")


def test_a_run_on_text_logs_tasks_and_texts(tiny, files, write_documents, tmp_path):
    (tmp_path / "held.txt").write_text("w1 w2 w3 w4 " * 9)
    config = tiny(
        {
            "data.path": str(write_documents(tmp_path / "documents")),
            "data.val_fraction": 0.5,
            "data.cache_dir": str(tmp_path / "cache"),
            "model.vocab_size": 270,
            "snapshot.enabled": False,
            "trainer.max_steps": 2,
            "eval.tasks": [files["choose"], files["read"]],
            "eval.texts": [str(tmp_path / "held.txt")],
            "eval.n_docs": 2,
        }
    )
    done = run(config, tmp_path / "run")
    found = {line["step"]: line for line in read_metrics(done.metrics) if "eval/held/bits_per_byte" in line}
    assert found.keys() == {0, 2}
    assert all({"eval/choose/acc", "eval/read/bits_per_byte"} <= line.keys() for line in found.values())
    assert found[2]["eval/held/bits_per_byte"] < found[0]["eval/held/bits_per_byte"]
