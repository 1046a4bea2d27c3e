"""What all tests share: how they are marked and run, the Python that they start, and a run that trains in a second."""

import contextlib
import gc
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib

# Read when a library is first imported. Nothing in the tests leaves the machine; and inductor compiles in the process
# that asks: a pool of processes for each of ours would load torch as often.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from dataclasses import replace
from functools import cache, partial, reduce
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np
import pytest
import torch
from forked_python import freeze_what_exists
from hypothesis import settings
from triton_kernels import IS_INTERPRETED

from birthmark.callbacks.config import LogConfig
from birthmark.data.config import DataConfig
from birthmark.measure.config import SnapshotConfig
from birthmark.models.config import ModelConfig
from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig

# Busy machines are slow, which is no fault of the code; and what decides whether a change lands decides it twice alike.
settings.register_profile("birthmark", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("birthmark")

# Until the tests run there is next to no garbage: looking for it takes a quarter of the time.
gc.disable()

#: Fixtures of one matter each (tests/fixtures).
_FIXTURES = ("small_models", "two_arms", "processes", "offline_wandb", "browser", "wheel", "real_models", "web_server")
pytest_plugins = [f"fixtures.{name}" for name in _FIXTURES]

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
_TESTS = Path(__file__).parent


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
    """Whether a function names what trains, itself or in a helper of the tests."""
    names, texts = _names_and_texts(function.__code__)
    helpers = (function.__globals__.get(name) for name in names)
    return bool(names & _TRAINING_NAMES or texts & _TRAINING_COMMANDS) or any(
        _trains(f)
        for f in helpers
        if isinstance(f, FunctionType) and _TESTS in Path(f.__code__.co_filename).parents and f is not function
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
    # What a script starts in its background, tests too, is deaf to Ctrl-C; what tests start is not.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(server, stdin=subprocess.PIPE, env=environment, start_new_session=True, preexec_fn=hears)

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

    Tests that are marked ``cuda`` are skipped where there is no GPU, those marked ``interpreter`` by all but
    ``make kernels``.
    """
    skips = {}
    if not torch.cuda.is_available():
        skips["cuda"] = pytest.mark.skip(reason="torch sees no GPU")
    if not IS_INTERPRETED:
        skips["interpreter"] = pytest.mark.skip(reason="`make kernels` runs it, in Triton's interpreter")
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)
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


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """What libraries and test modules hold stays: collections of garbage need not look through it each time."""
    freeze_what_exists()
    gc.enable()


# ---------------------------------------------------------------- what is drawn at random


def _seed_generators(name):
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


# What a test draws without a seed of its own would else hang on the tests before it in its process.
@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    _seed_generators(f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    _seed_generators(item.nodeid)


# ---------------------------------------------------------------- fixtures of many tests


@pytest.fixture(scope="module", autouse=True)
def one_thread(request):
    """Tiny tensors gain nothing from more threads, and lose tenfold to a busy neighbour on the same cores.

    Whole runs keep their threads: they are compared bit for bit with runs of other processes.
    """
    before = torch.get_num_threads()
    if request.path.relative_to(_TESTS).parts[0] in ("models", "metrics"):
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


@pytest.fixture
def homeless(monkeypatch):
    """A user without HOME and without an entry in /etc/passwd, as in a container under any number."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)


@pytest.fixture
def refused(capsys):
    """``refused(*words, status=2)``: the one line of a command that ends with this status and says nothing else."""
    from birthmark.launch.cli import main

    def run(*words, status=2):
        capsys.readouterr()
        assert main([*map(str, words)]) == status, words
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1), error
        return error

    return run
