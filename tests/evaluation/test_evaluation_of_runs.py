"""Evaluation while a run trains: its scores, that it leaves training alone, how often it is, and what is refused."""

import math

import numpy as np
import pytest
import torch
from quiet_runs import logged, run, same_weights

from birthmark.callbacks.evaluation import Evaluation, thinned
from birthmark.data.backcopy import TRIGGERS, BackCopy
from birthmark.data.config import DataConfig
from birthmark.data.prepare import prepare
from birthmark.errors import UsageError
from birthmark.evaluation.config import EvalConfig
from birthmark.evaluation.evaluator import Evaluator, Material, backcopy_scores
from birthmark.evaluation.texts import Window, prepare_text, read_text, score, text_windows
from birthmark.measure.metrics_log import read_metrics
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.trainer.checkpoints.folder_io import load_model

TEXT = "hello wörld, some other text here hello hello " * 3


@pytest.fixture(scope="module")
def model(enliven):
    return enliven(born(ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=300, max_seq_len=12), 0))


def plain_log_probs(model, window):
    """Of one window alone, by the softmax of its logits in float64."""
    with torch.no_grad():
        p_TV = model(torch.tensor([list(window.inputs)]))[0].double().softmax(-1)
    last_SV = p_TV[-len(window.targets) :]
    targets = list(window.targets)
    return last_SV[range(len(targets)), targets].log(), last_SV.argmax(-1) == torch.tensor(targets)


def test_scores_of_windows_are_those_of_each_alone(model):
    draw = np.random.default_rng(0)
    lengths = [(12, 12), (3, 1), (7, 4), (1, 1), (5, 5)]
    windows = [Window(*(draw.integers(0, 300, n).tolist() for n in both)) for both in lengths]
    likely = plain_log_probs(model, windows[1])
    best = int(model(torch.tensor([list(windows[1].inputs)]))[0, -1].argmax())
    windows.append(Window(windows[1].inputs, [best]))
    assert not likely[1].any()
    model.train()
    random = torch.get_rng_state()
    for likeliest in (False, True):
        found = score(model, windows, 2, likeliest=likeliest)
        for one, window in zip(found, windows, strict=True):
            log_probs, is_likeliest = plain_log_probs(model, window)
            torch.testing.assert_close(one.log_probs, log_probs, rtol=1e-4, atol=1e-5)
            assert torch.equal(one.is_likeliest, is_likeliest & likeliest)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert score(model, [], 2) == []


@pytest.mark.parametrize("stride", [12, 5, 1])
def test_windows_predict_every_token_once_with_enough_before_it(stride):
    tokens = list(range(100, 131))
    windows = text_windows(tokens, 7, 12, stride)
    assert [target for window in windows for target in window.targets] == tokens
    read, done = [7, *tokens], 0
    for window in windows:
        end = done + len(window.targets)
        assert len(window.inputs) <= 12
        assert read[end - len(window.inputs) : end] == window.inputs
        assert len(window.inputs) == min(end, 12)
        done = end
    assert text_windows([], 7, 12, stride) == []


def test_bits_per_byte_are_those_of_the_plain_formula(model, word_tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    text = prepare_text(read_text(str(tmp_path / "text.txt"), 1 << 16), word_tokenizer, 12, 4)
    tokens = [word_tokenizer.end_of_text, *word_tokenizer.encode([TEXT])[0].tolist()]
    nats = 0.0
    for t in range(1, len(tokens)):
        # The first window predicts 12, each further one 4 after 8 that it only reads.
        block = max(0, -(-(t - 12) // 4))
        first = max(0, min(len(tokens) - 1, 12 + 4 * block) - 12)
        log_p = plain_log_probs(model, Window(tokens[first:t], [tokens[t]]))[0]
        nats -= float(log_p[-1])
    expected = nats / math.log(2) / len(TEXT.encode())
    assert text.bits_per_byte(model, 4) == pytest.approx(expected, rel=1e-5)


def test_a_text_is_cut_between_characters_and_what_is_none_is_refused(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("aé€z")
    assert [read_text(str(file), n) for n in (1, 2, 3, 5, 6, 7, 99)] == ["a", "a", "aé", "aé", "aé€", "aé€z", "aé€z"]
    file.write_bytes(b"a\xffb")
    with pytest.raises(UsageError, match="byte 1 is no UTF-8"):
        read_text(str(file), 9)
    file.write_bytes(b"")
    with pytest.raises(UsageError, match="no text in it"):
        read_text(str(file), 9)
    with pytest.raises(UsageError, match="No such file"):
        read_text(str(tmp_path / "other"), 9)


def test_the_backcopy_score_tells_copies_from_guesses():
    task = BackCopy(24, 12, 5, "val")

    class Perfect(torch.nn.Module):
        """Knows the table and copies."""

        def __init__(self, copies):
            super().__init__()
            self.config, self.copies = ModelConfig(vocab_size=24), copies
            self.device = torch.device("cpu")

        def forward(self, tokens_BT):
            logits_BTV = torch.full((*tokens_BT.shape, 24), -30.0)
            for b, row in enumerate(tokens_BT.tolist()):
                for t, token in enumerate(row):
                    if token not in TRIGGERS:
                        p = task.next_token_probabilities(token)
                        logits_BTV[b, t] = torch.from_numpy(np.log(np.maximum(p, 1e-13)))
                    elif self.copies:
                        logits_BTV[b, t, row[t - 1]] = 0.0
            return logits_BTV

    perfect = backcopy_scores(Perfect(True), task, 200, 64)
    assert perfect["copy_accuracy"] == 1
    assert abs(perfect["excess_loss"]) < 1e-5
    guessing = backcopy_scores(Perfect(False), task, 200, 64)
    assert guessing["copy_accuracy"] < 0.2
    # An even guess among all 24 tokens after each trigger, and nothing else, is worse.
    triggers = np.isin(task.batch(0, 200)[:, :-1], TRIGGERS).mean()
    assert guessing["excess_loss"] == pytest.approx(triggers * np.log(24), abs=1e-5)


# ---------------------------------------------------------------- in a run

EVALUATED = {"eval.tasks": ["backcopy"], "eval.n_docs": 8, "eval.every": 2, "eval.share": 1.0}


def final(run):
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=12)
    return load_model(config, run.checkpoints_by_step()[6])


def scores_by_step(run):
    lines = [line for line in read_metrics(run.metrics) if "eval/backcopy/copy_accuracy" in line]
    return [(line["step"], {k: v for k, v in line.items() if k.startswith("eval/")}) for line in lines]


def test_a_run_is_evaluated_and_trains_as_one_that_is_not(tiny, tmp_path):
    plain = {"snapshot.enabled": False, "optim.schedule": "constant"}
    without = run(tiny(plain), tmp_path / "without")
    # A run that goes on evaluates no milestone twice.
    run(tiny({**plain, **EVALUATED, "trainer.max_steps": 4}), tmp_path / "with")
    evaluated = run(tiny({**plain, **EVALUATED}), tmp_path / "with", resume=True)
    found = scores_by_step(evaluated)
    assert [step for step, _ in found] == [0, 2, 4, 6]
    expected = backcopy_scores(final(evaluated), BackCopy(24, 12, 5, "val"), 8, 3)
    assert found[-1][1] == pytest.approx({f"eval/backcopy/{k}": v for k, v in expected.items()}, rel=1e-5)
    assert list(logged(evaluated, "train/evaluation_s")) == [0, 2, 4, 6]
    assert same_weights(without, evaluated, 6)


def test_how_often_it_is_evaluated_follows_from_its_share():
    # 1000 steps, evaluations that take 2 steps each: with 1 % five are within it, with four intervals between them.
    assert thinned(1000, 100, 2.0, 0.01) == 3
    assert thinned(1000, 100, 0.1, 0.01) == 1
    # Birth and the end alone.
    assert thinned(1000, 100, 50.0, 0.01) == 10
    assert thinned(1000, 100, 50.0, 1.0) == 1
    for cost in (0.01, 0.3, 1.0, 2.0, 3.3):
        n = thinned(1000, 10, cost, 0.01)
        taken = 1 + math.ceil(1000 / (10 * n))
        assert taken * cost <= 0.01 * 1000 or n == 100


class Steps:
    def __init__(self, max_steps):
        self.max_steps, self.global_step, self.loggers, self.should_stop = max_steps, 0, [], False


class Holder:
    model = None


def test_what_takes_too_long_is_evaluated_more_rarely_and_says_so(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("birthmark.callbacks.milestones.time.perf_counter", lambda: clock[0])
    taken, said = [], []

    def evaluate(model):
        taken.append(trainer.global_step)
        clock[0] += 3.0
        return {}

    def callback():
        return Evaluation(10, evaluate, "a text", 0.1, lambda: 0.5, said.append)

    trainer, first = Steps(600), callback()
    first.on_train_start(trainer, Holder)
    for step in range(1, 301):
        trainer.global_step = step
        first.on_step_end(trainer, Holder, step)
    # Ten of 6 steps each are a tenth of 600: nine intervals, of 70 steps.
    assert taken == [0, 70, 140, 210, 280]
    assert said[0] == "evaluation of a text: 3 s at step 0"
    assert said[1].startswith("eval.share is 0.1, and one evaluation takes as long as 6 steps")
    assert "every 70 steps, not 10" in said[1]
    trainer.should_stop = True
    second = callback()
    second.load_state_dict(first.state_dict())
    for step in range(301, 601):
        trainer.global_step = step
        second.on_step_end(trainer, Holder, step)
    assert taken[5:] == [350, 420, 490, 560, 600]
    assert len(said) == 2


def test_an_extended_run_is_evaluated_as_one_of_that_length(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("birthmark.callbacks.milestones.time.perf_counter", lambda: clock[0])

    def evaluated(callback, steps, max_steps):
        taken, trainer = [], Steps(max_steps)

        def evaluate(model):
            taken.append(trainer.global_step)
            clock[0] += 3.0
            return {}

        callback.evaluate = evaluate
        if steps[0] == 0:
            callback.on_train_start(trainer, Holder)
        for step in steps[steps[0] == 0 :]:
            trainer.global_step = step
            callback.on_step_end(trainer, Holder, step)
        return taken

    def callback():
        return Evaluation(10, None, "a text", 0.1, lambda: 0.5, lambda line: None)

    whole, short, longer = callback(), callback(), callback()
    every = evaluated(whole, range(601), 600)
    assert evaluated(short, range(101), 100) == [0, 100]
    longer.load_state_dict(short.state_dict())
    assert evaluated(longer, range(101, 601), 600) == [step for step in every if step > 100]
    # A state of an earlier version has no time: the next that is due is evaluated, and the rest as it affords.
    older = callback()
    older.load_state_dict({name: short.state_dict()[name] for name in ("every", "share", "nth")})
    assert evaluated(older, range(101, 601), 600) == [110, *(step for step in every if step > 110)]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"eval.every": 3}, "eval.every is given, but eval.tasks and eval.texts is empty"),
        ({"eval.tasks": ["backcopy"], "eval.every": 3}, r"give a multiple of trainer.checkpoint_every \(2\)"),
        ({"eval.tasks": ["backcopy", "backcopy"]}, "eval.tasks has 'backcopy' twice"),
        ({"eval.tasks": ["backcopy"], "eval.share": 0.0}, "eval.share is 0.0: give a number above 0"),
        ({"eval.tasks": ["backcopy"], "eval.n_shot": 2}, "eval.n_shot is given, but"),
        ({"eval.tasks": ["backcopy"], "eval.stride": 20}, "eval.stride is 20: give at most 12"),
        ({"eval.tasks": ["arc_easy"]}, "data.path backcopy is no text"),
        ({"eval.texts": ["a/b.txt", "c/b.md"], "data.path": "x"}, "eval.texts has 'b' twice"),
        ({"eval.tasks": ["backcopy"], "data.path": "x"}, "eval.tasks has backcopy, but data.path is 'x'"),
        ({"eval.tasks": ["backcopy"], "model.attention.prefix": 3}, "see the answers that eval asks for"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_line(tiny, overrides, line):
    with pytest.raises(UsageError, match=line):
        tiny(overrides)


def test_a_task_that_is_asked_for_is_scored_or_refused():
    config, settings = EvalConfig(tasks=["backcopy"]), {"tokenizer_path": None, "max_seq_len": 12, "batch_size": 3}
    few = prepare(DataConfig(path="backcopy", train_samples=3), vocab_size=24, seq_len=12)
    assert "backcopy" in Evaluator(config, Material({}, None), validation=few.val, **settings).title
    with pytest.raises(UsageError, match=r"^eval\.tasks: backcopy is scored on samples of data\.path backcopy alone"):
        Evaluator(config, Material({}, None), validation=few.train, **settings)


def test_a_text_that_is_missing_ends_a_run_before_its_data(tiny, tmp_path, monkeypatch):
    config = tiny({"data.path": "stdlib", "eval.texts": [str(tmp_path / "gone.txt")]})
    monkeypatch.setattr("birthmark.trainer.run.prepare", lambda *a, **k: pytest.fail("the data came first"))
    with pytest.raises(UsageError, match=r"eval.texts has .*gone.txt"):
        run(config, tmp_path / "run")
