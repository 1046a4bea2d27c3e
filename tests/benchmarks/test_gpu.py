"""``make gpu`` rehearsed on the CPU, so that its first hour on a GPU fails on nothing silly."""

import json
import math
import subprocess
import sys
import time
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

from birthmark.trainer import numerics

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("profile", "tests", "arms", "train", "snapshots", "big")
#: Runs, their resumption and their pages have tests of their own; they take as long as all else here.
ELSEWHERE = "commands"


@pytest.fixture(scope="module")
def gpu():
    """``gpu(name)``: a module of ``benchmarks``."""
    return import_module


@pytest.fixture(scope="module")
def rehearsed(gpu, python, tmp_path_factory):
    """The record of all parts, run in this process one by one, as separate starts: content and page."""
    out, part_run, plan = tmp_path_factory.mktemp("gpu"), gpu("gpu_run.part_run"), gpu("gpu_run.plan")
    setting = gpu("gpu_run.case").Setting("cpu", True, time.monotonic() + 600)
    chosen = {part: [case for case in plan.cases_of(part, setting) if case.name != ELSEWHERE] for part in PARTS}
    statuses = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_run, "cases_of", lambda part, setting: chosen[part])
        patch.setattr(gpu("gpu_run.parts.strategies"), "PYTHON", python)
        for part in PARTS:
            statuses[part] = part_run.run_part(part, setting, part_run.record_of("cpu", out), print)
    (file,) = out.glob("*.json")
    content = json.loads(file.read_text())["parts"]
    failed = {row["note"] for part in content.values() for row in part["rows"] if row["status"] == "failed"}
    assert (statuses, failed) == (dict.fromkeys(PARTS, 0), set())
    return content, file.with_suffix(".md").read_text()


def rows(rehearsed, part, table):
    return [row for row in rehearsed[0][part]["rows"] if row["table"].startswith(table)]


def check_numbers(found, *names):
    assert found
    for row in found:
        for name in names:
            assert math.isfinite(row[name]), (name, row)
            assert row[name] > 0, (name, row)


@pytest.mark.heavy
def test_every_part_is_there_with_its_machine_and_nothing_is_left(rehearsed):
    content, page = rehearsed
    assert list(content) == list(PARTS)
    for name, part in content.items():
        assert part["done"] == part["cases"]
        assert {row["case"] for row in part["rows"]} == set(part["cases"])
        assert part["machine"]["torch"] == torch.__version__
        assert f"## {name}\n" in page
        assert "commit" in part["machine"]


@pytest.mark.heavy
def test_births_and_tests(rehearsed):
    (birth,) = rows(rehearsed, "tests", "Birth digests")
    assert birth["same"] is True
    (tests,) = rows(rehearsed, "tests", "Tests marked cuda")
    assert (tests["passed"], tests["failed"]) == (0, 0) or torch.cuda.is_available()
    assert tests["passed"] + tests["skipped"] > 0


@pytest.mark.heavy
def test_a_launched_strategy_has_the_losses_of_a_single_process(rehearsed):
    (sharded,) = rows(rehearsed, "tests", "Strategies")
    assert sharded["strategy"] == "fsdp2"
    assert sharded["largest difference of a loss"] < 1e-5


@pytest.mark.heavy
def test_a_strategy_that_fails_or_computes_otherwise_is_a_row_that_failed(gpu, python, monkeypatch, tmp_path):
    strategies = gpu("gpu_run.parts.strategies")
    monkeypatch.setattr(strategies, "PYTHON", python)
    setting = gpu("gpu_run.case").Setting("cpu", True, time.monotonic() + 120)
    # One is refused before its first step, the other has not the losses that are expected.
    ways = {"refused": strategies.Way("fsdp2", ("--trainer.offload=cpu",)), "different": strategies.SINGLE}
    rows = {name: strategies._beside(way, [4.0, 4.0], tmp_path / name, setting) for name, way in ways.items()}
    assert {row["status"] for row in rows.values()} == {"failed"}
    assert "trainer.offload" in rows["refused"]["note"]
    assert rows["different"]["note"].startswith("more than")


@pytest.mark.parametrize(("losses", "expected"), [([2.0, math.nan], [2.0, 1.0]), ([2.0, 1.0], [2.0, math.nan])])
def test_a_loss_that_is_no_number_is_within_no_tolerance(gpu, losses, expected):
    assert math.isnan(gpu("gpu_run.parts.strategies").largest_difference(losses, expected))


@pytest.mark.heavy
def test_every_arm_in_both_directions(rehearsed, gpu):
    arms = [*gpu("attention_cost").ARMS, *gpu("gpu_run.parts.arms").SEPARATE]
    for way in ("One attention, forward, ", "One attention, forward and backward, "):
        found = rows(rehearsed, "arms", way)
        assert [row["arm"] for row in found] == arms
        check_numbers(found, "ms", "× plain")
    mixtures = rows(rehearsed, "arms", "One MLP, ")
    assert [row["MLP"].partition(":")[0] for row in mixtures] == ["dense", "experts", "experts one by one"]
    check_numbers(mixtures, "ms", "× dense")


@pytest.mark.heavy
def test_speeds_beside_other_libraries(rehearsed):
    *runs, in_fp8 = rows(rehearsed, "train", "As a run")
    check_numbers(runs, "ms", "tokens/s", "first step, s")
    assert [row["batch"] for row in runs] == ["1 × 2 × 16", "4 × 2 × 16"]
    assert [row["tokens/s"] * row["ms"] / 1000 for row in runs] == pytest.approx([32, 128])
    assert (in_fp8["status"], in_fp8["note"]) == ("skipped", numerics.fp8_problem(torch.device("cpu")))
    found = [row for row in rows(rehearsed, "train", "tiny") if row["status"] == "ok"]
    assert sorted({row["library"] for row in found}) >= ["birthmark", "transformers"]
    check_numbers(found, "ms", "tokens/s", "ours over it")
    # Both libraries have the whole model, or the comparison means nothing.
    assert {row["parameters"] for row in found if row["case"].startswith("tiny beside")} == {11872}
    unable = [row for row in rows(rehearsed, "train", "tiny") if row["status"] != "ok"]
    assert {row["library"] for row in unable} == {"litgpt", "nano-gpt"}
    assert {row["status"] for row in unable} <= {"not installed", "skipped"}


def test_a_step_lasts_for_all_of_its_micro_batches(gpu):
    marks = gpu("gpu_run.fit")._Marks(torch.device("cpu"))
    # Two steps of three micro-batches, and the end.
    marks.marks = [0, 1, 2, 10, 11, 12, 30]
    assert marks.seconds(3) == [10, 20]
    assert marks.seconds(1) == [1, 1, 8, 1, 1, 18]


@pytest.mark.heavy
def test_snapshots_and_plans(rehearsed):
    found = rows(rehearsed, "snapshots", "Snapshot over")
    check_numbers(found, "forward, ms", "snapshot, ms", "ratio")
    # A rehearsal's ratio says nothing of the limit.
    assert {row["verdict"] for row in found} == {"open"}
    # No kernel in Triton runs on a CPU.
    assert {(row["by walk, ms"], row["by walk, ratio"], row["note"]) for row in found} == {
        (None, None, "no walk: the device is cpu")
    }
    solved = rows(rehearsed, "snapshots", "Eigenvalues")
    assert [row["way"] for row in solved] == ["on streams", "one by one", "by one call", "on the host"]
    assert max(row["largest difference"] for row in solved) < 1e-12
    check_numbers(solved, "ms", "ratio")
    check_numbers(rows(rehearsed, "big", ""), "planned, GiB", "tokens/s")


@pytest.mark.heavy
def test_a_profile_says_where_the_time_goes(rehearsed):
    found = rows(rehearsed, "profile", "Where the time goes")
    assert [(row["case"], row.get("pass")) for row in found] == [
        ("snapshot of tiny", "forward"),
        ("snapshot of tiny", "snapshot"),
        ("training tiny", None),
    ]
    check_numbers(found, "ms", "device busy, ms", "kernels")
    # An observed pass does all that the plain one does.
    assert found[1]["kernels"] > found[0]["kernels"]


def test_intervals_that_overlap_are_busy_once(gpu):
    assert gpu("gpu_run.parts.profile")._busy([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


@pytest.mark.heavy
def test_the_study_trains_its_arms_and_goes_on_after_a_deadline(gpu, python, tmp_path, monkeypatch):
    study, case = gpu("gpu_run.parts.study"), gpu("gpu_run.case")
    monkeypatch.setattr(study, "PYTHON", python)
    monkeypatch.setattr(study, "HOME", tmp_path / "gpu-study")

    def part(seconds):
        setting = case.Setting("cpu", True, time.monotonic() + seconds, ("headnorm",))
        (only,) = study.cases(setting)
        return list(only.run(setting))

    monkeypatch.setattr(study, "_ENDING", 0.0)
    run, *milestones = part(300)
    assert (run["status"], run["arm"]) == ("ok", "headnorm")
    assert [row["step"] for row in milestones] == [0, 1, 2, 4, 6]
    assert all(math.isfinite(row["val loss"]) and math.isfinite(row["sink_mass, text"]) for row in milestones)
    again, *same = part(300)
    assert (again["status"], again["tokens"]) == ("ok", run["tokens"])
    assert same == milestones


def test_an_arm_that_is_none_is_refused_before_any_run(gpu):
    setting = gpu("gpu_run.case").Setting("cpu", True, math.inf, ("plain", "headnrom"))
    with pytest.raises(ValueError, match=r"'headnrom'.*headnorm"):
        gpu("gpu_run.parts.study").cases(setting)


def test_what_does_not_end_at_the_deadline_is_killed(gpu, monkeypatch):
    study = gpu("gpu_run.parts.study")
    monkeypatch.setattr(study, "_ENDING", 0.1)
    deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    study._wait({"deaf": process}, time.monotonic())
    assert process.wait() == -9


# ---------------------------------------------------------------- what goes wrong


@pytest.fixture
def run(gpu, tmp_path, monkeypatch):
    """``run(cases, go_on=None, part="arms")``: status and rows of a part of these cases."""
    part_run = gpu("gpu_run.part_run")

    def start(cases, go_on=None, part="arms", deadline=math.inf, tiny=True):
        monkeypatch.setattr(part_run, "cases_of", lambda part, setting: cases)
        setting = gpu("gpu_run.case").Setting("cpu", tiny, deadline)
        record = part_run.record_of("cpu", tmp_path)
        status = part_run.run_part(part, setting, record, print, go_on)
        return status, part_run.record_of("cpu", tmp_path).parts[part]["rows"]

    return start


def measures(value):
    def case(setting):
        yield {"table": "t", "value": value}

    return case


def breaks(error, after=()):
    def case(setting):
        yield from ({"table": "t", "value": value} for value in after)
        raise error

    return case


def seen(rows):
    return [(row["case"], row["status"], row.get("value")) for row in rows]


@pytest.mark.heavy
def test_an_error_is_a_row_and_the_rest_goes_on(gpu, run):
    case = gpu("gpu_run.case").Case
    cases = [
        case("a", measures(1)),
        case("b", breaks(ValueError("no such\nthing"), after=[2])),
        case("c", breaks(torch.OutOfMemoryError("CUDA out of memory"))),
        case("d", measures(3)),
    ]
    status, found = run(cases)
    assert status == 1
    assert seen(found) == [("a", "ok", 1), ("b", "ok", 2), ("b", "failed", None), ("c", "failed", None), ("d", "ok", 3)]
    assert [row["note"] for row in found if row["status"] == "failed"] == [
        "ValueError: no such",
        "OutOfMemoryError: CUDA out of memory",
    ]


def test_a_broken_device_ends_the_process_and_another_one_goes_on(gpu, run):
    case = gpu("gpu_run.case").Case
    cases = [case("a", breaks(RuntimeError("CUDA error: an illegal memory access"))), case("b", measures(1))]
    status, found = run(cases)
    assert (status, seen(found)) == (gpu("gpu_run.processes").BROKEN, [("a", "failed", None)])
    status, found = run(cases, go_on="")
    assert (status, seen(found)) == (1, [("a", "failed", None), ("b", "ok", 1)])


def test_a_case_in_which_the_process_ended_has_failed(gpu, run):
    case = gpu("gpu_run.case").Case

    def interrupted(setting):
        yield {"table": "t", "value": 1}
        raise KeyboardInterrupt

    cases = [case("a", interrupted), case("b", measures(2))]
    with pytest.raises(KeyboardInterrupt):
        run(cases)
    status, found = run(cases, go_on="killed: too long")
    assert status == 1
    assert seen(found) == [("a", "ok", 1), ("a", "failed", None), ("b", "ok", 2)]
    assert found[1]["note"] == "killed: too long"


def test_what_time_does_not_allow_is_told(gpu, run):
    status, found = run([gpu("gpu_run.case").Case("a", measures(1), seconds=50)], deadline=0, tiny=False)
    assert (status, seen(found)) == (0, [("a", "not reached", None)])


@pytest.mark.heavy
def test_a_part_that_runs_again_replaces_its_own_rows(gpu, run):
    case = gpu("gpu_run.case").Case
    run([case("a", measures(1))], part="arms")
    run([case("a", measures(2))], part="train")
    _, arms = run([case("b", measures(3))], part="arms")
    assert seen(arms) == [("b", "ok", 3)]
    _, train = run([], part="train", go_on="")
    assert seen(train) == [("a", "ok", 2)]


#: Crashes at its first start, hangs at its second, and fails at its third; writes down why it was started.
CRASHES = """
import os, signal, sys, time
from pathlib import Path
file = Path(sys.argv[1])
with file.open("a") as starts:
    print(next((word for word in sys.argv if word.startswith("--go-on")), "first"), file=starts)
n = len(file.read_text().splitlines())
if n == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60 if n == 2 else 0)
sys.exit(1)
"""


@pytest.mark.heavy
def test_a_process_that_crashes_or_hangs_is_followed_by_another(gpu, tmp_path, monkeypatch):
    processes, starts = gpu("gpu_run.processes"), tmp_path / "starts"
    monkeypatch.setattr(processes, "GRACE", 1.0)
    command = [sys.executable, "-S", "-c", CRASHES, str(starts)]
    assert processes.run_watched(command, {}, print, budget=0.5) == 1
    first, crashed, hung = starts.read_text().splitlines()
    assert first == "first"
    assert crashed == "--go-on=its process ended with status -11"
    assert hung.startswith("--go-on=killed: not over 1 s")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "rehearsal alone"),
        (["--device", "cpu", "--scale", "tiny", "--out", str(ROOT / "benchmarks/results")], "measures nothing"),
    ],
)
def test_a_cpu_never_writes_results(gpu, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        gpu("on_gpu").main()
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- wheels


def make_wheel(folder, name, version):
    """A wheel of one module, by hand."""
    stem = f"{name}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def test_what_is_missing_is_put_beside_this_python_and_nothing_else(gpu, tmp_path):
    environment = gpu("gpu_run.environment")
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    make_wheel(wheels, "missing_here", "1.0")
    make_wheel(wheels, "numpy", "0.1")  # this one is installed
    found = environment.provide(wheels, site)
    code = "import missing_here, numpy, birthmark; print(missing_here.version, birthmark.__file__)"
    # Elsewhere than in the repository, and in isolation from what started it.
    done = subprocess.run([sys.executable, "-c", code], env=found, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["1.0", str(site / "birthmark" / "__init__.py")], done.stderr
    assert sorted(path.name for path in site.glob("*.py")) == ["missing_here.py"]


def test_a_package_that_is_too_old_counts_as_missing(gpu, monkeypatch):
    environment = gpu("gpu_run.environment")
    wheels = [Path("scipy-1.17.1-cp312-cp312-any.whl"), Path("PyYAML-6.0-py3-none-any.whl")]
    assert environment.lower_bounds()["scipy"] == (1, 12)
    for version, needed in (("1.11.9", wheels[:1]), ("1.12", []), ("1.17.1", [])):
        monkeypatch.setattr(
            environment.importlib.metadata, "version", {"scipy": version, "pyyaml": "6.0.2"}.__getitem__
        )
        assert environment.needed(wheels) == needed


def test_wheels_have_a_largest_size_and_leave_torch_alone(gpu, tmp_path, monkeypatch):
    environment = gpu("gpu_run.environment")
    assert not {"torch", "numpy", "triton"} & {*environment.PACKAGES, *environment.BUILT}
    monkeypatch.setattr(environment, "WHEELS", tmp_path)

    def download(command, **options):
        assert "--no-deps" in command  # or the largest of all would come along
        tmp_path.mkdir(exist_ok=True)
        with (tmp_path / "large-1-py3-none-any.whl").open("wb") as file:
            file.truncate(61 * 10**6)

    monkeypatch.setattr(environment.subprocess, "run", download)
    with pytest.raises(SystemExit, match="at most 60 MB"):
        environment.collect()
