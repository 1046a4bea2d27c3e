"""What a run decides of its numerics from config and device, keeps when it goes on, and refuses."""

import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from rich.console import Console

from birthmark import kernel_devices
from birthmark.errors import UsageError
from birthmark.measure.records import RunDir
from birthmark.models.attention.fused import native
from birthmark.plan.cluster import Cluster
from birthmark.plan.planner import Planner
from birthmark.trainer import numerics
from birthmark.trainer.config import TrainerConfig
from birthmark.trainer.run import pretrain
from birthmark.trainer.saved_config import config_differences

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def units(monkeypatch):
    """``units(yes)``: CPUs with units for bf16, or without. For decisions alone: a run would load kernels of C, and
    instructions that a processor lacks end the process.
    """

    def have(yes):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: yes)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    return have


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(major, minor)``: every GPU has this compute capability."""
    return lambda *capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(("yes", "precision"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_cpu_has_units_for_it(units, yes, precision):
    units(yes)
    assert numerics.decide(TrainerConfig(precision="auto"), CPU).precision == precision


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_auto_is_bf16_from_compute_capability_8_on(gpu, capability, precision, monkeypatch):
    gpu(*capability)
    monkeypatch.setattr(numerics, "why_not_triton", lambda device_type: "")
    asked = TrainerConfig(precision="auto", strategy="fsdp2")
    decided = numerics.decide(asked, GPU)
    assert (decided.precision, decided.gather) == (precision, precision)
    lines = numerics.decisions(asked, decided, GPU)
    assert lines[0] == f"precision: {precision} (trainer.precision auto); config.yaml records it"
    assert len(lines) == (2 if precision == "bf16" else 1)


def test_what_is_given_is_kept(units, monkeypatch):
    units(True)
    monkeypatch.setattr(native, "why_not", lambda: "")
    for asked in (TrainerConfig(), TrainerConfig(strategy="fsdp2", precision="bf16", gather="fp32")):
        assert numerics.decide(asked, CPU) == replace(asked, gather="fp32" if asked.strategy == "fsdp2" else "auto")
        assert numerics.decisions(asked, asked, CPU) == []


def test_a_run_says_that_the_device_has_no_units_for_the_bf16_that_was_asked_for(units, gpu, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda: "")
    monkeypatch.setattr(numerics, "why_not_triton", lambda device_type: "")
    asked = TrainerConfig(precision="bf16")
    for has, n_lines in ((True, 0), (False, 1)):
        units(has)
        gpu(8 if has else 7, 5)
        for device in (CPU, GPU):
            lines = numerics.decisions(asked, asked, device)
            assert len(lines) == n_lines
            assert all("no units" in line and "fp32 is faster" in line for line in lines)


def test_a_run_says_why_attention_is_not_our_kernels(monkeypatch, units):
    units(True)
    monkeypatch.setattr(native, "why_not", lambda: "there is no C compiler (gcc)")
    for precision, lines in (("fp32", 0), ("bf16", 1)):
        found = numerics.decisions(TrainerConfig(), TrainerConfig(precision=precision), CPU)
        assert len(found) == lines
        assert all("there is no C compiler (gcc)" in line for line in found)


def test_a_run_says_why_kernels_in_triton_do_not_run(gpu, monkeypatch):
    """Triton, a C compiler and a GPU that is new enough, each missing alone."""
    gpu(9, 0)
    missing = kernel_devices._missing_for_triton.__wrapped__
    monkeypatch.setattr(kernel_devices, "_missing_for_triton", missing)
    monkeypatch.setattr(kernel_devices, "find_spec", lambda name: None)
    asked = TrainerConfig()
    assert numerics.decisions(asked, asked, CPU) == []
    (line,) = numerics.decisions(asked, asked, GPU)
    assert line.endswith("which are slower, in their place (Triton is missing, pip install triton)")
    monkeypatch.setattr(kernel_devices, "find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(kernel_devices.shutil, "which", {"gcc": "/usr/bin/gcc"}.get)
    assert missing() == ""
    monkeypatch.setenv("CC", "tcc")
    assert missing() == "Triton needs a C compiler (tcc), apt install gcc"
    monkeypatch.delenv("CC")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu(7, 5)
    assert missing() == "the GPU is of compute capability 7.5, Triton takes 8.0 and newer"
    monkeypatch.setattr(kernel_devices.shutil, "which", lambda name: None)
    assert missing() == "Triton needs a C compiler (gcc), apt install gcc"


def test_a_run_records_what_it_decided_and_keeps_it_elsewhere(tiny, monkeypatch, tmp_path):
    config = tiny({"trainer.precision": "auto", "trainer.max_steps": 2, "snapshot.enabled": False})
    monkeypatch.setattr(numerics, "fast_in_bf16", lambda device: True)
    run = pretrain(config, RunDir(tmp_path / "run"), console=Console(quiet=True)).run
    assert yaml.safe_load(run.config.read_text())["trainer"]["precision"] == "bf16"
    assert config_differences(config, run) == {}
    monkeypatch.setattr(numerics, "fast_in_bf16", lambda device: False)
    longer = replace(config, trainer=replace(config.trainer, max_steps=4))
    with (tmp_path / "said.txt").open("w") as said:
        pretrain(longer, run, resume=True, console=Console(file=said))
    assert "precision: bf16 (trainer.precision auto)" in (tmp_path / "said.txt").read_text()
    assert yaml.safe_load(run.config.read_text())["trainer"]["precision"] == "bf16"


def test_a_plan_is_for_the_precision_of_its_gpus(tiny, units):
    units(False)
    config = tiny({"trainer.precision": "auto"})
    found = [Planner(config, Cluster(1, name)).config.trainer.precision for name in ("h100-80gb", "cpu")]
    assert found == ["bf16", "fp32"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"matmul": "tf32"}, "trainer.matmul is tf32, which only GPUs of compute capability 8.0 or more have"),
        ({"compile": "blocks"}, r"trainer.compile is blocks, which needs a C\+\+ compiler"),
    ],
)
def test_what_the_device_cannot_do_is_one_line_before_anything_is_written(fields, words, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    config = tiny({f"trainer.{name}": value for name, value in fields.items()})
    with pytest.raises(UsageError, match=words) as refused:
        pretrain(config, RunDir(tmp_path / "run"), console=Console(quiet=True))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_old_gpu_has_no_tf32_and_a_new_one_has(gpu):
    gpu(7, 5)
    assert len(numerics.device_problems(TrainerConfig(matmul="tf32"), GPU)) == 1
    gpu(8, 0)
    assert numerics.device_problems(TrainerConfig(matmul="tf32"), GPU) == []


def state():
    cudnn = torch.backends.cudnn
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        cudnn.deterministic,
        cudnn.benchmark,
    )


def test_what_torch_keeps_for_the_process_is_set_on_a_gpu_and_put_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    settings = TrainerConfig(matmul="tf32", deterministic=True)
    with numerics.numerics(settings, CPU):
        assert state() == before
    with numerics.numerics(settings, GPU):
        assert state() == ("high", True, False, True, False)
        assert numerics.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert state() == before


@pytest.mark.cuda
def test_deterministic_runs_and_resumes_on_a_gpu_are_equal_bit_for_bit(tiny, tmp_path):
    fields = {"trainer.device": "cuda", "trainer.deterministic": True, "trainer.precision": "bf16"}
    config = tiny(fields | {"model.vocab_size": 512, "model.d_model": 64, "snapshot.enabled": False})
    runs = [pretrain(config, RunDir(tmp_path / name), console=Console(quiet=True)).run for name in "ab"]
    shutil.copytree(runs[0].path, tmp_path / "c")
    resumed = RunDir(tmp_path / "c")
    for step in (4, 6):
        shutil.rmtree(resumed.checkpoint(step))
    pretrain(config, resumed, resume=True, console=Console(quiet=True))
    ends = [
        {file.name: file.read_bytes() for file in sorted(run.checkpoint(6).glob("*.safetensors"))}
        for run in (*runs, resumed)
    ]
    assert ends[0]
    assert ends[0] == ends[1] == ends[2]
