"""What several folders' tests share: a run that trains in a second, small models of transformers, two processes."""

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import shutil
import site
import socket
import struct
import subprocess
import sys
import tempfile
import time
import venv

# Read when a library is first imported. Nothing in the tests leaves the machine; and inductor compiles in the process
# that asks: a pool of processes for each of ours would load torch as often.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace

import pytest
import torch
import yaml
from hypothesis import settings
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from birthmark.callbacks.config import LogConfig
from birthmark.data.config import DataConfig
from birthmark.data.tokenizer import TextTokenizer, train_bpe
from birthmark.measure.config import SnapshotConfig
from birthmark.models.config import ModelConfig
from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig

# Busy machines are slow, which is no fault of the code; and what decides whether a change lands decides it twice alike.
settings.register_profile("birthmark", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("birthmark")

_TINY = RunConfig(
    name="tiny",
    init_seed=3,
    model=ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=12),
    data=DataConfig(path="backcopy", data_seed=5),
    optim=OptimConfig(lr=0.01, warmup_steps=2, grad_clip=0.5),
    trainer=TrainerConfig(
        max_steps=6,
        micro_batch_size=2,
        global_batch_size=4,
        checkpoint_every=2,
        log_every=1,
        val_sequences=6,
        device="cpu",
    ),
    snapshot=SnapshotConfig(n_sequences=10, seq_len=8, batch_size=4, top_k=5, n_strangers=2),
    log=LogConfig(wandb="off"),
)


def _set(config, path, value):
    head, _, rest = path.partition(".")
    return replace(config, **{head: _set(getattr(config, head), rest, value) if rest else value})


# ---------------------------------------------------------------- which tests train

#: What a test, a fixture or a helper names that trains a model or starts a process, and the commands that do.
_TRAINING_NAMES = {"pretrain", "fit", "Trainer", "run_trials", "Popen", "subprocess", "get_context", "spawn"}
_TRAINING_COMMANDS = {"pretrain", "ablate"}


def _names_and_texts(code):
    """Names and strings in a function's code, and in that of the functions inside it."""
    texts = {const for const in code.co_consts if isinstance(const, str)}
    names = {*code.co_names, *code.co_freevars}
    for inner in (const for const in code.co_consts if isinstance(const, CodeType)):
        more_names, more_texts = _names_and_texts(inner)
        names, texts = names | more_names, texts | more_texts
    return names, texts


@cache
def _trains(function):
    """Whether a function names what trains, itself or in a helper of its own module."""
    names, texts = _names_and_texts(function.__code__)
    helpers = (function.__globals__.get(name) for name in names)
    return bool(names & _TRAINING_NAMES or texts & _TRAINING_COMMANDS) or any(
        _trains(f)
        for f in helpers
        if isinstance(f, FunctionType) and f.__module__ == function.__module__ and f is not function
    )


def pytest_configure(config):
    """Start the server of `python` once for all workers; it imports nothing before a test asks for it."""
    if hasattr(config, "workerinput"):
        return
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    # Neither threads that compute nor a CUDA context survive a fork.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    server = [sys.executable, "-W", "ignore", Path(__file__).with_name("forked_python.py"), folder]
    process = subprocess.Popen(server, stdin=subprocess.PIPE, env=environment, start_new_session=True)

    def stop():
        process.communicate()
        shutil.rmtree(folder)

    config.add_cleanup(stop)
    os.environ["FORKED_PYTHON"] = str(folder / "python")


@pytest.fixture(scope="session")
def python():
    """A Python that has imported what runs need, and starts in a moment (tests/forked_python.py)."""
    file = Path(os.environ["FORKED_PYTHON"])
    while not file.exists():
        time.sleep(0.05)
    return str(file)


def pytest_collection_modifyitems(items):
    """Mark tests that train a model or start a process ``training``: ``make quick`` leaves them out.

    Tests that are marked ``cuda`` are skipped where there is no GPU.
    """
    no_gpu = pytest.mark.skip(reason="torch sees no GPU")
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        info = item._fixtureinfo
        fixtures = [
            definition.func for name in info.names_closure for definition in info.name2fixturedefs.get(name, ())
        ]
        functions = [f for f in (item.function, *fixtures) if isinstance(f, FunctionType)]
        if any(map(_trains, functions)):
            item.add_marker(pytest.mark.training)
    # Files that take long come first: what is left at the end then keeps all workers busy.
    long = {item.path for item in items if item.get_closest_marker("training")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish():
    """What libraries and test modules hold stays: collections of garbage need not look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def one_thread(request):
    """Tiny tensors gain nothing from more threads, and lose tenfold to a busy neighbour on the same cores.

    Whole runs keep their threads: they are compared bit for bit with runs of other processes.
    """
    before = torch.get_num_threads()
    if request.path.parent.name in ("models", "metrics"):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny():
    """A tiny run's config; dotted fields can be overridden: ``tiny({"trainer.max_steps": 2})``."""

    def build(overrides=None):
        return reduce(lambda config, item: _set(config, *item), (overrides or {}).items(), _TINY)

    return build


@pytest.fixture(scope="session")
def modules_folder(tmp_path_factory):
    """Where transformers copies code before it runs: it imports from one folder for the life of a process."""
    return str(tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="session")
def write_documents():
    """``write_documents(folder)``: text files of very different lengths."""

    def write(folder):
        folder.mkdir()
        for i in range(60):
            (folder / f"{i:02d}.txt").write_text(" ".join(f"w{(i * j) % 23}" for j in range(1 + i * i % 17)))
        return folder

    return write


def _inside(target, value):
    """A context manager in which ``target`` is something else."""

    @contextlib.contextmanager
    def patched():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target, value)
            yield

    return patched


@pytest.fixture(scope="session")
def no_page():
    """``no_page()``: inside, runs end without their page, which takes longer than small runs."""
    return _inside("birthmark.trainer.run._write_report", lambda run: None)


@pytest.fixture(scope="session")
def no_snapshot_page():
    """``no_snapshot_page()``: inside, a run's page is written without that of its newest snapshot, whose sixty pictures
    take many times longer than a small run."""
    return _inside("birthmark.report.run_page.build_snapshot_page", lambda folder: None)


@pytest.fixture(scope="session")
def seal_config():
    """``seal_config(file, text)``: write a run's ``config.yaml`` of this text, as another version of us would have."""

    def write(file, text):
        file.write_text(f"{text}# sha256 of the lines above: {hashlib.sha256(text.encode()).hexdigest()}\n")

    return write


# ---------------------------------------------------------------- models of transformers


_ROTARY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = _ROTARY | {"num_key_value_heads": 2, "rms_norm_eps": 1e-4}


def _rope(theta, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_GPT2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 24,
    "layer_norm_epsilon": 1e-4,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: (architecture, config); all are shapes that our decoder can be.
_THEIRS = {
    "gpt2": ("GPT2", _GPT2),
    "gpt2 untied, relu, narrow": (
        "GPT2",
        _GPT2 | {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"},
    ),
    "llama": ("Llama", _GROUPED | _rope(500.0)),
    "llama tied, biased, wide heads": (
        "Llama",
        _GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "qwen2": ("Qwen2", _GROUPED | _rope(1e6)),
    "qwen2 tied": ("Qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _GROUPED | _rope(1e6) | {"head_dim": 16}),
    "qwen3 tied, gelu": ("Qwen3", _GROUPED | {"tie_word_embeddings": True, "head_dim": 8, "hidden_act": "gelu"}),
    "mistral": ("Mistral", _GROUPED | _rope(500.0) | {"sliding_window": 5}),
    "olmo2": ("Olmo2", _GROUPED | _rope(500.0)),
    "olmo2 tied, ungrouped": ("Olmo2", _ROTARY | {"tie_word_embeddings": True}),
    "arcee": ("Arcee", _GROUPED | _rope(500.0) | {"hidden_act": "gelu"}),
    "arcee tied, biased": (
        "Arcee",
        _GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "gpt_neox": ("GPTNeoX", _ROTARY | _rope(10000.0, partial_rotary_factor=0.5) | {"layer_norm_eps": 1e-4}),
    "gpt_neox tied, serial": (
        "GPTNeoX",
        _ROTARY | {"tie_word_embeddings": True, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
}


@pytest.fixture(scope="session")
def enliven():
    """``enliven(model, seed=0)``: random values everywhere; at 0 and 1, biases and gains hide where they enter."""

    @torch.no_grad()
    def enliven(model, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.3 * noise)
        return model.eval()

    return enliven


@pytest.fixture(scope="session")
def their_shape():
    """Keys of a small model with rotary positions and grouped heads, as most of their configs have them."""
    return dict(_GROUPED)


@pytest.fixture(scope="session")
def their_names():
    """Models of transformers that our decoder can be; each begins with its model type."""
    return list(_THEIRS)


@pytest.fixture(params=_THEIRS)
def their_name(request):
    """Each of them in turn."""
    return request.param


@pytest.fixture(scope="session")
def their_config():
    """``their_config(name, **more)``: the config of one of them."""
    import transformers

    def build(name, **more):
        architecture, config = _THEIRS[name]
        return getattr(transformers, f"{architecture}Config")(**config, **more)

    return build


@pytest.fixture(scope="session")
def their_model(their_config, enliven):
    """``their_model(name, **more)``: the model, with random values everywhere."""
    import transformers

    def build(name, **more):
        architecture = _THEIRS[name][0]
        head = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
        return enliven(getattr(transformers, f"{architecture}{head}")(their_config(name, **more)))

    return build


# ---------------------------------------------------------------- what is snapshotted


@pytest.fixture(scope="session")
def small_probe():
    """A probe that a tiny model reads in no time, and that batches do not share evenly."""
    return SnapshotConfig(n_sequences=10, seq_len=8, batch_size=4, n_strangers=2, top_k=5)


@pytest.fixture
def llama(their_config):
    """``llama(seed=0)``: a newborn causal LM with dropout, so that modes and random numbers matter in training."""
    import transformers

    def build(seed=0):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return transformers.LlamaForCausalLM(their_config("llama", attention_dropout=0.1))

    return build


@pytest.fixture(scope="session")
def word_tokenizer():
    """A byte-level BPE of 270 tokens that puts ``<s>``, its token 269, before a text."""
    trained = train_bpe(["hello world "] * 9 + ["some other text here "] * 9, 269)
    tokenizer = Tokenizer.from_str(trained.content.decode())
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 269)])
    return TextTokenizer(tokenizer.to_str().encode())


@pytest.fixture(scope="session")
def token_batches():
    """Five batches ``[4, 12]`` of token ids."""
    return torch.randint(0, 61, (5, 4, 12), generator=torch.Generator().manual_seed(7))


# ---------------------------------------------------------------- a study of two arms on the tiny run

_ARMS = {"plain": {}, "headnorm": {"model.attention.aggregation": "headnorm"}}


@pytest.fixture(scope="session")
def arms():
    """Its arms, name → fields."""
    return dict(_ARMS)


@pytest.fixture(scope="session")
def study_file(tiny, arms):
    """``study_file(folder, overrides=None, **fields)``: write it and its base into ``folder``; the study's file.

    Overrides change the base; fields replace those of the study, None takes one away.
    """

    def write(folder, overrides=None, **fields):
        base = dataclasses.asdict(tiny({"snapshot.probes": ["random", "text"], **(overrides or {})}))
        del base["name"], base["run_dir"]
        (folder / "base.yaml").write_text(yaml.safe_dump(base))
        study = {"name": "tiny", "base": "base.yaml", "init_seeds": [0, 1], "arms": arms} | fields
        file = folder / "study.yaml"
        file.write_text(yaml.safe_dump({k: v for k, v in study.items() if v is not None}, sort_keys=False))
        return file

    return write


# ---------------------------------------------------------------- two processes


#: Threads of gloo that still hold a tensor while Python ends abort it; runs wait for them
#: (trainer/processes/process_group.py). A script whose results are checked need not end Python.
_LEAVE = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="session")
def as_ranks(python):
    """``as_ranks(script, *arguments, n=2)``: run it as ranks 0 … n − 1; what each printed, and their exit statuses.

    It is given its rank, then the arguments, in which ``{rank}`` is the rank.
    """

    def run(script, *arguments, n=2):
        command = [python, "-W", "ignore", "-c", script + _LEAVE]
        started = [
            subprocess.Popen(
                [*command, *(str(argument).replace("{rank}", str(rank)) for argument in (rank, *arguments))],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(n)
        ]
        try:
            outputs = [process.communicate(timeout=300)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        return outputs, [process.returncode for process in started]

    return run


@pytest.fixture
def two_ranks(tmp_path, as_ranks):
    """``two_ranks(script, ending)``: run it as ranks 0 and 1; the files that they wrote.

    Its arguments: the rank, the file of their store, and the file that it writes to.
    """

    def run(script, ending):
        _, statuses = as_ranks(script, tmp_path / "store", tmp_path / f"{{rank}}{ending}")
        assert statuses == [0, 0]
        return [tmp_path / f"{rank}{ending}" for rank in range(2)]

    return run


@pytest.fixture(scope="session")
def free_port():
    """``free_port()``: a port that nobody listens at."""

    def find():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return free.getsockname()[1]

    return find


@pytest.fixture(scope="session")
def torchrun(free_port):
    """``torchrun(*command, n=2)``: start it in n processes of one core each."""

    def start(*command, n=2, python=sys.executable):
        launcher = [python, "-m", "torch.distributed.run", f"--nproc_per_node={n}"]
        return subprocess.Popen(
            [*launcher, f"--master_port={free_port()}", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return start


@pytest.fixture(scope="session")
def launched(torchrun, python):
    """``launched(*command, n=2)``: run it under torchrun to its end, which must be a good one; what it printed."""

    def run(*command, n=2):
        process = torchrun(*command, n=n, python=python)
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            process.kill()
        # The first to fail says why; what is lost in the middle is that others are gone.
        assert process.returncode == 0, f"{errors[:6000]}\n[…]\n{errors[-2000:]}"
        return output

    return run


@pytest.fixture(scope="session")
def forked(python, free_port):
    """``forked(script, *arguments, n=2)``: run it in n processes of one core each to a good end; what rank 0 printed.

    As a launcher it ends all when one fails.
    """

    def run(script, *arguments, n=2):
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        common |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        command, ends = [python, "-W", "ignore", script, *map(str, arguments)], time.monotonic() + 300
        with contextlib.ExitStack() as files:
            printed = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(n)]
            ranks = [
                subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "DS_ACCELERATOR": "cpu", **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank, file in enumerate(printed)
            ]
            try:
                while (statuses := {rank.poll() for rank in ranks}) == {None} or statuses == {None, 0}:
                    assert time.monotonic() < ends, "the ranks have not ended within 300 s"
                    time.sleep(0.02)
            finally:
                for rank in ranks:
                    rank.kill()
            outputs = [file.seek(0) or file.read() for file in printed]
        assert statuses == {0}, "\n[another rank]\n".join(
            f"{output[:6000]}\n[…]\n{output[-2000:]}" for output in outputs
        )
        return outputs[0]

    return run


@pytest.fixture
def launched_script(tmp_path, launched):
    """``launched_script(script, *arguments, n=2)``: the same of a script's text."""

    def run(script, *arguments, n=2):
        file = tmp_path / "script.py"
        file.write_text(script)
        return launched(file, *arguments, n=n)

    return run


@pytest.fixture(scope="session")
def pretrain_script(tmp_path_factory):
    """A script, to be launched with a config's file, a run's folder, ``begin`` or ``resume``, and flags: what
    ``birthmark pretrain`` does before its report, which takes longer than small runs."""
    file = tmp_path_factory.mktemp("pretrain") / "script.py"
    file.write_text("""
import sys
from pathlib import Path

from birthmark.measure.records import RunDir
from birthmark.trainer.config_file import read_config
from birthmark.trainer.run import pretrain

file, out, resume, *flags = sys.argv[1:]
overrides = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
pretrain(read_config(file, overrides), RunDir(Path(out)), resume=resume == "resume")
""")
    return file


# ---------------------------------------------------------------- W&B


def _log_records(content):
    """Records of a LevelDB log (32 KiB blocks of chunks: checksum, length, type), after W&B's 7-byte header."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        if left < 7 or kind == 0:
            position += left
            continue
        if position + 7 + length > len(content):  # still being written
            return
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full or last
            yield parts
            parts = b""


@pytest.fixture(scope="session", autouse=True)
def no_wandb_of_ours(tmp_path_factory):
    """What this machine says of W&B does not reach the tests, and what they leave does not stay."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("wandb")))
        yield


def _offline_start(file):
    """What the file of one start of a run holds."""
    from wandb.proto import wandb_internal_pb2

    start = SimpleNamespace(history=[], config={}, alerts=[], artifacts={}, axes={}, whole=False)
    for data in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        start.whole |= kind == "exit"
        if kind == "history":
            items = record.history.item
            start.history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        if kind == "run":
            start.run = record.run
            start.config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        if kind == "alert":
            start.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        if kind == "metric":
            start.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        if kind == "artifact" and record.artifact.type != "run_table":
            start.artifacts[record.artifact.name] = [entry.path for entry in record.artifact.manifest.contents]
    start.id, start.files = file.stem.removeprefix("run-"), file.parent / "files"
    start.logged = {key: value for line in start.history for key, value in line.items()}
    return start


@pytest.fixture(scope="session")
def offline_wandb():
    """``offline_wandb(folder)``: each start of a run there, in order of time, from the files that ``wandb sync`` would
    send: its id, run, config, axes, history, all that was logged, alerts, artifacts and files."""

    def read(folder):
        found = []
        for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
            # The process that writes it may still do so when the run has finished.
            end = time.monotonic() + 30
            start = _offline_start(file)
            while not start.whole and time.monotonic() < end:
                time.sleep(0.1)
                start = _offline_start(file)
            assert start.whole, f"{file} has no end"
            found.append(start)
        return found

    return read


# ---------------------------------------------------------------- a real browser

_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, driven by playwright; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'birthmark[dev]'")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium is installed: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
        yield found
        found.close()


class _Tab:
    """A page in a tab of its own, and what went wrong in it."""

    def __init__(self, browser, file, fragment="", width=1280, **settings):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        self.page = self.context.new_page()
        self.problems, self.asked = [], []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri() + fragment)

    def text(self, selector):
        return self.page.inner_text(selector)

    def run(self, script):
        return self.page.evaluate(script)


@pytest.fixture
def open_page(browser):
    """``open_page(file, fragment, width, **settings)``: a tab; fails where anything was logged, or fetched."""
    tabs = []

    def open_tab(file, fragment="", width=1280, **settings):
        tabs.append(_Tab(browser, file, fragment, width, **settings))
        return tabs[-1]

    yield open_tab
    for tab in tabs:
        tab.context.close()
        assert tab.problems == []
        assert all(url.startswith(("file:", "data:")) for url in tab.asked)


# ---------------------------------------------------------------- the wheel


#: The repository, whichever birthmark is imported.
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel of the files that git knows: what lies beside them (builds, runs) must not decide what is in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    if not (source / "setup.py").is_file():
        pytest.skip("not a git checkout")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", out, "."], cwd=source, check=True)
    (file,) = out.glob("birthmark-*.whl")
    return file


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """``installed(*arguments)``: run ``birthmark`` of the wheel in a folder of its own, with these libraries."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True)
    # Everything else comes from the environment that runs the tests; ours stands before it.
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments, status=0):
        command = [python.with_name("birthmark"), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=clean)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    run.folder, run.python, run.env = folder, python, clean
    return run
