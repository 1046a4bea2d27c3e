"""`birthmark audit` of small suites with the names of published ones: their stages and ingredients are read."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_suites import STEPS, train, weights_file

from birthmark.audit.checkpoint import find_members
from birthmark.audit.training_order import Place, at_step, missing_places, said_place
from birthmark.models.exchange.pretrained import load_pretrained

NAMES = {
    "step143000": (0, 0, 143_000),
    "step-5125000": (0, 0, 5_125_000),
    "step-480k-token-1007B": (0, 0, 480_000),
    "step1000-tokens4B": (0, 0, 1000),
    "stage1-step928646-tokens3896B": (1, 0, 928_646),
    "stage2-ingredient3-step11931-tokens50B": (2, 3, 11_931),
    "stage3-step11921": (3, 0, 11_921),
    "stage1-step-40000": (1, 0, 40_000),
    "ckpt_000": (0, 0, 0),
    "ckpt_358": (0, 0, 358),
    "CrystalCoder_phase2_checkpoint_214387": (2, 0, 214_387),
    "step-024000_tokens-0100B-phase1": (1, 0, 24_000),
    "checkpoint-500": (0, 0, 500),
    "global_step1000": (0, 0, 1000),
    "iter_0002384": (0, 0, 2384),
    "step-00000020": (0, 0, 20),
}


def test_names_of_published_suites_are_read():
    for name, (stage, ingredient, step) in NAMES.items():
        place = said_place(name)
        assert (place.stage, place.ingredient, place.step) == (stage, ingredient, step), name
    order = [
        "stage1-step-3440000", "stage2-step-3480000", "stage3-step-4720000",
        "lc-4k-to-32k-step-4000", "lc-4k-to-32k-step-20000", "lc-32k-to-64k-step-4000",
    ]  # fmt: skip
    assert sorted(order, key=said_place) == order
    assert said_place("extension_step0001220") > said_place("step0753851")
    assert said_place("stage2-step47684-mix-round5-from-2T-ckpt").chain != said_place("stage2-step47684").chain
    assert said_place("lc-4k-to-32k-step-4000").words == "lc-4k-to-32k step 4000"
    assert said_place("stage2-ingredient1-step10-tokens1B").words == "stage 2 ingredient 1 step 10"
    for mean in ("main", "it-soup-APO", "it-SFT", "stage2-ingredient1+2-step23842", "stage2-step10-soup"):
        assert said_place(mean) is None


def test_places_that_a_regular_suite_leaves_out_are_found():
    def missing(*steps):
        return [place.step for place in missing_places(map(at_step, steps))]

    assert missing(*range(0, 70, 10), *range(90, 130, 10)) == [70, 80]
    powers = [0, *(2**i for i in range(10))]
    assert missing(*powers, *range(1000, 9000, 1000), 10_000) == [9000]
    assert missing(*range(0, 50, 10), 100) == [50, 60, 70, 80, 90]
    # Far more than it has are no gap, and not listed one by one.
    assert missing(*range(5), 2 * 10**18) == missing(*range(5), 12) == []
    assert missing(*powers) == missing(0, 10, 20) == missing(5) == missing() == []
    steps = (Place(2, "stage 2", 1, "", step) for step in (10, 20, 30, 50, 60))
    assert [place.words for place in missing_places(steps)] == ["stage 2 ingredient 1 step 40"]


@pytest.mark.parametrize(
    "named",
    [
        lambda i: f"step{(0, 1, 2, 4, 8, 16, 143_000)[i]}",
        lambda i: f"step-{125_000 * (i + 1)}",
        lambda i: f"ckpt_{i:03}",
        lambda i: f"global_step{1000 * (i + 1)}",
        lambda i: f"stage{1 + i // 4}-step-{40_000 * (i + 1)}",
        lambda i: f"CrystalCoder_phase{1 + i // 4}_checkpoint_{500 * (i % 4 + 1):06}",
    ],
    ids=["pythia", "smollm2", "amber", "bloom", "smollm3", "crystal"],
)
def test_a_clean_suite_has_no_alarm_under_any_names(clean, audited, tmp_path, named):
    for i, step in enumerate(STEPS):
        shutil.copytree(clean / f"step-{step}", tmp_path / named(i))
    shutil.copytree(clean / f"step-{STEPS[-1]}", tmp_path / "main")
    found = audited(tmp_path, status=0).json
    assert [name.rpartition("/")[2] for name in found["order"]] == [named(i) for i in range(len(STEPS))]
    assert [one["findings"] for one in found["checkpoints"]] == 8 * [[]]


@pytest.fixture(scope="session")
def staged(tmp_path_factory):
    """A stage, two ingredients that begin at its end and learn another language, and their mean."""
    folder = tmp_path_factory.mktemp("suites") / "staged"
    trunk = train(0, folder.parent / "trunk", (10, 20, 30, 40))
    for step in (10, 20, 30, 40):
        shutil.copytree(trunk / f"step-{step}", folder / f"stage1-step{step}-tokens{step}B")
    for k in (1, 2):
        model = load_pretrained(trunk / "step-40").train()
        part = train(10 + k, folder.parent / f"part{k}", (0, 10, 20, 30), lambda step: 1 - step / 30, model, language=1)
        for step in (10, 20, 30):
            shutil.copytree(part / f"step-{step}", folder / f"stage2-ingredient{k}-step{step}-tokens{step}B")
    ends = [folder / f"stage2-ingredient{k}-step30-tokens30B" for k in (1, 2)]
    shutil.copytree(ends[0], folder / "main")
    a, b = (load_file(end / "model.safetensors") for end in ends)
    save_file({name: (a[name] + b[name]) / 2 for name in a}, folder / "main" / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("ending", "write"),
    [(".safetensors", save_file), pytest.param(".pt", torch.save, marks=pytest.mark.heavy)],
    ids=["safetensors", "pt"],
)
def test_files_of_steps_are_checkpoints_each_by_itself(clean, audited, tmp_path, ending, write, python, monkeypatch):
    monkeypatch.setattr("sys.executable", python)
    folder = tmp_path / "files"
    folder.mkdir()
    steps = (0, 4, 8)
    for step in steps:
        write(load_file(weights_file(clean, step)), folder / f"model_step{step}{ending}")
    write(load_file(weights_file(clean, 12)), folder / f"final{ending}")
    found = audited(folder, status=0).json
    names = [f"{folder}/model_step{step}{ending}" for step in steps]
    assert [(one["name"], one["step"]) for one in found["checkpoints"]] == [
        *zip(names, steps, strict=True), (f"{folder}/final{ending}", None)
    ]  # fmt: skip
    assert audited(*names, status=0).json["order"] == names
    (folder / f"model_step4{ending}").write_bytes(b"")
    assert audited(folder).said[4] == "is empty"


@pytest.mark.parametrize("names", [("step1-1-of-2", "step2-2-of-2"), ("a_step1", "b_step1"), ("step1", "model")])
def test_parts_of_a_model_are_one_checkpoint(tmp_path, names):
    for name in names:
        save_file({name: torch.zeros(3)}, tmp_path / f"{name}.safetensors")
    assert [member.name for member in find_members([str(tmp_path)])] == [str(tmp_path)]


def test_the_steps_below_a_finished_training_are_audited_with_it(clean, audited, tmp_path):
    """As the Trainer leaves them, whatever the folder's name; DeepSpeed's states in a checkpoint are none."""
    out = shutil.copytree(clean / "step-24", tmp_path / "sft-step-500")
    for step in (4, 12, 24):
        shutil.copytree(clean / f"step-{step}", out / f"checkpoint-{step}")
        (out / f"checkpoint-{step}" / f"global_step{step}").mkdir()
        (out / f"checkpoint-{step}" / f"global_step{step}" / "mp_rank_00_model_states.pt").touch()
    found = audited(out, status=0)
    assert [one["step"] for one in found.json["checkpoints"]] == [4, 12, 24, None]
    assert found.said[None] == "has the weights of step 24"
    states = shutil.copytree(out / "checkpoint-4" / "global_step4", tmp_path / "states")
    (member,) = find_members([str(out / "checkpoint-4")])
    assert member.step == 4
    for step in (4, 12, 24):
        shutil.rmtree(out / f"checkpoint-{step}")
    (out / "runs").mkdir()
    shutil.copytree(states, out / "global_step1000")
    assert [member.name for member in find_members([str(out)])] == [str(out)]


def short(names):
    return [name.rpartition("/")[2].partition("-tokens")[0] for name in names]


def swap(suite, a, b):
    files = [next(suite.glob(f"{name}-tokens*")) / "model.safetensors" for name in (a, b)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[::-1], strict=True):
        file.write_bytes(content)


def kinds(found):
    return {short([one["name"]])[0]: [f["kind"] for f in one["findings"]]
            for one in found.json["checkpoints"] if one["findings"]}  # fmt: skip


def test_stages_and_ingredients_are_put_in_order(staged, audited, tmp_path):
    found = audited(staged, status=0).json
    assert found["sentence"] == "11 checkpoints of one birth: nothing is wrong with them"
    trainings = {"stage1": (10, 20, 30, 40), "stage2-ingredient1": (10, 20, 30), "stage2-ingredient2": (10, 20, 30)}
    assert short(found["order"]) == [f"{part}-step{step}" for part, steps in trainings.items() for step in steps]
    (last,) = (one for one in found["checkpoints"] if short([one["name"]]) == ["stage2-ingredient2-step30"])
    assert (last["stage"], last["ingredient"], last["step"]) == ("stage 2", 2, 30)
    (main,) = (one for one in found["checkpoints"] if one["name"].endswith("main"))
    assert main["notes"] == ["is the mean of stage 2 ingredient 1 step 30, stage 2 ingredient 2 step 30"]
    # Five steps of one ingredient.
    for name in ("stage1-step10", "stage1-step20", "stage1-step30", "stage2-ingredient1-step10",
                 "stage2-ingredient1-step20"):  # fmt: skip
        folder = next(staged.glob(f"{name}-tokens*"))
        shutil.copytree(folder, tmp_path / folder.name)
    found = audited(tmp_path, status=0).json
    assert found["sentence"].startswith("5 checkpoints of one birth: nothing is wrong with them")


OTHER_STAGE = [("stage1-step20", "stage2-ingredient2-step20"), ("stage1-step40", "stage2-ingredient1-step30")]
SAME_STAGE = [("stage1-step20", "stage1-step30"), ("stage2-ingredient1-step20", "stage2-ingredient2-step20")]


@pytest.mark.parametrize("pair", [*SAME_STAGE, *OTHER_STAGE])
def test_exchanged_checkpoints_are_found_within_stages_and_between_them(staged, audited, tmp_path, pair):
    suite = shutil.copytree(staged, tmp_path / "suite")
    (suite / "main" / "model.safetensors").unlink()
    shutil.rmtree(suite / "main")
    swap(suite, *pair)
    assert kinds(audited(suite)) == {name: ["order"] for name in pair}


def test_one_checkpoint_under_names_of_two_stages_is_found(staged, audited, tmp_path):
    suite = shutil.copytree(staged, tmp_path / "suite")
    weights = {path.name.partition("-tokens")[0]: path / "model.safetensors" for path in suite.iterdir()}
    for name in ("stage1-step40", "stage2-ingredient1-step10"):
        shutil.copy(weights["stage1-step20"], weights[name])
    found = audited(suite)
    assert kinds(found) == {"stage1-step40": ["duplicate"], "stage2-ingredient1-step10": ["duplicate"]}
    assert all("on the curve they are at stage 1 step 20" in f["what"]
               for one in found.json["checkpoints"] for f in one["findings"])  # fmt: skip
