"""A plan's peak against the memory that real runs take: of Lightning with this project's strategies, in processes."""

import dataclasses
import json
import platform

import pytest
import yaml

from birthmark.plan.cluster import Cluster
from birthmark.plan.planner import Planner, with_strategy

#: Rank, processes, store, config file, output, device; then trainer configs as JSON. Peaks in bytes as JSON.
SCRIPT = """
import ctypes, gc, json, logging, os, re, sys, warnings
warnings.filterwarnings("ignore")
import lightning as L
import torch
import torch.distributed as dist
from dataclasses import replace
from pathlib import Path
from birthmark.trainer.config_file import read_config
from birthmark.data.batch_sizes import BatchRamp
from birthmark.data.packing import DocumentBorders
from birthmark.models.birth import born
from birthmark.trainer.config import TrainerConfig
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.strategies.lightning_setup import set_up_strategy

rank, world, (store, file, out, device) = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:7]
trainers = [
    TrainerConfig(**(fields | {"batch_ramp": BatchRamp(**fields["batch_ramp"])})) for fields in json.loads(sys.argv[7])
]
torch.set_num_threads(1)
# Freed memory goes back to the system at once, so that resident memory is what tensors hold.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
for name in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
    assert ctypes.CDLL(None).mallopt(name, 65536)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
    os.environ[name] = str(value)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
if world > 1:
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
config = read_config(Path(file))
BORDERS = DocumentBorders(0) if config.model.attention.documents else None

class Random(torch.utils.data.IterableDataset):
    def __init__(self, config):
        self.shape = config.trainer.micro_batch_size, config.model.max_seq_len + 1
        self.size = config.model.vocab_size

    def __iter__(self):
        while True:
            # One token of twenty ends a document.
            yield torch.randint(self.size, self.shape) * (torch.rand(self.shape) > 0.05)

def train(config):
    strategy = set_up_strategy(config.trainer, config.optim.grad_clip, torch.device(device))
    model = born(config.model, 0, "cpu", strategy.shard)
    batches = torch.utils.data.DataLoader(Random(config), batch_size=None)
    L.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu", devices=world, strategy=strategy.lightning, max_steps=2,
        accumulate_grad_batches=config.trainer.global_batch_size // (config.trainer.micro_batch_size * world),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(PretrainModule(model, config.optim, config.trainer, borders=BORDERS), batches)

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

peaks = []
small = replace(config.model, d_model=48, d_ff=32, n_layers=1, vocab_size=64, max_seq_len=64)
for trainer in trainers:
    # A first run loads libraries, starts threads and allocates buffers of gloo once and for all.
    train(replace(config, model=small, trainer=trainer))
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(replace(config, trainer=trainer))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        continue
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    train(replace(config, trainer=trainer))
    peaks.append(status("VmHWM") - before)
Path(out).write_text(json.dumps(peaks))
"""


@pytest.fixture
def run(tiny):
    """A run of 6 M parameters: 100 MB with gradients and optimizer state."""
    sizes = {"d_model": 256, "n_layers": 3, "n_heads": 4, "vocab_size": 8192, "max_seq_len": 128, "mlp": "swiglu"}
    batches = {"trainer.micro_batch_size": 4, "trainer.global_batch_size": 16}
    return tiny({f"model.{name}": size for name, size in sizes.items()} | batches)


@pytest.fixture
def measured(run, tmp_path, as_ranks):
    """``measured(n_processes, trainers, device="cpu", config=run)``: peaks of the processes in bytes,
    ``[processes][trainers]``."""
    file = tmp_path / "run.yaml"

    def measure(n_processes, trainers, device="cpu", config=run):
        fields = dataclasses.asdict(config)
        del fields["name"], fields["run_dir"]
        file.write_text(yaml.safe_dump(fields))
        fields_json = json.dumps([dataclasses.asdict(trainer) for trainer in trainers])
        arguments = n_processes, tmp_path / "store", file, tmp_path / "{rank}.json", device, fields_json
        _, statuses = as_ranks(SCRIPT, *arguments, n=n_processes)
        assert statuses == [0] * n_processes
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(n_processes)]

    return measure


def check(run, trainers, n_processes, peaks, gpu, rel=0.1):
    planner = Planner(run, Cluster(n_processes, gpu))
    for number, trainer in enumerate(trainers):
        planned = planner.plan(trainer).peak
        for of_process in peaks:
            assert planned == pytest.approx(of_process[number], rel=rel), trainer.strategy


glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="resident memory is read from /proc, and freed memory returned by mallopt"
)


@glibc
def test_peak_of_a_single_process(run, measured):
    # Two micro-batches a step: the first, and a later one.
    trainer = dataclasses.replace(run.trainer, global_batch_size=8)
    trainers = [with_strategy(trainer, "single", "none"), with_strategy(trainer, "single", "full")]
    trainers.append(dataclasses.replace(with_strategy(trainer, "single", "selective"), precision="bf16"))
    check(run, trainers, 1, measured(1, trainers), "cpu")


@glibc
def test_peak_with_documents_that_see_themselves_alone(run, measured):
    attention = dataclasses.replace(run.model.attention, documents=True)
    model = dataclasses.replace(run.model, attention=attention, vocab_size=512, max_seq_len=512)
    trainer = dataclasses.replace(with_strategy(run.trainer, "single", "none"), micro_batch_size=8, global_batch_size=8)
    apart = dataclasses.replace(run, model=model, trainer=trainer)
    # Of three runs the least, as what else is resident only adds; a plan of whole sequences is .94 of it.
    (peaks,) = measured(1, [trainer] * 3, config=apart)
    check(apart, [trainer], 1, [[min(peaks)]], "cpu", rel=0.05)


@glibc
def test_peak_of_two_processes(run, measured):
    sharded, full = with_strategy(run.trainer, "fsdp2", "none"), with_strategy(run.trainer, "fsdp2", "full")
    copied = with_strategy(run.trainer, "ddp", "full")
    at_once = dataclasses.replace(copied, global_batch_size=8)
    trainers = [sharded, dataclasses.replace(full, precision="bf16", gather="bf16"), copied, at_once]
    check(run, trainers, 2, measured(2, trainers), "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peak_on_a_gpu(run, measured, precision):
    trainers = [
        dataclasses.replace(with_strategy(run.trainer, "single", kind), precision=precision, device="cuda")
        for kind in ("none", "selective", "full")
    ]
    check(run, trainers, 1, measured(1, trainers, "cuda"), "h100-80gb")
