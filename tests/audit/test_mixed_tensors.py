"""`birthmark audit`: tensors that are another checkpoint's are found, with whose they are; frozen ones are no fault."""

import shutil

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from trained_suites import STEPS, weights_file

ONE = "model.layers.1.mlp.down_proj.weight"
PARTS = {
    "block 0 (model.layers.0, 8 tensors)": lambda name: name.startswith("model.layers.0."),
    "block 0 (model.layers.0, 8 tensors) and model.embed_tokens.weight": lambda name: (
        name.startswith("model.layers.0.") or name == "model.embed_tokens.weight"
    ),
    "model.embed_tokens.weight": lambda name: name == "model.embed_tokens.weight",
    ONE: lambda name: name == ONE,
    f"all tensors but {ONE}": lambda name: name != ONE,
}


def plant(suite, victim, owner, chosen, dtype=None):
    """Give a checkpoint some tensors of another, rounded to ``dtype``."""
    tensors, others = (load_file(weights_file(suite, step)) for step in (victim, owner))
    taken = {name: x if dtype is None else x.to(dtype).to(x.dtype) for name, x in others.items() if chosen(name)}
    save_file(tensors | taken, weights_file(suite, victim))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("victim", "owner"), [(4, 20), (12, 8), (24, 0)])
def test_tensors_of_another_step_are_found_and_whose_they_are(suite, audited, part, victim, owner):
    plant(suite, victim, owner, PARTS[part])
    found = audited(suite)
    assert found.kinds == {victim: ["mixed"]}
    assert found.said[victim] == f"has {part} of step {owner}"
    # What is left of it lies where its step is.
    assert [name.rpartition("-")[2] for name in found.json["order"]] == [str(step) for step in STEPS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_tensors_of_another_step_are_found(suite, audited, dtype):
    plant(suite, 8, 16, PARTS["model.embed_tokens.weight"], getattr(torch, dtype))
    found = audited(suite)
    assert found.kinds == {8: ["mixed"]}
    assert found.said[8] == f"has model.embed_tokens.weight of step 16, rounded to {dtype}"
    plant(suite, 8, 20, lambda name: True, getattr(torch, dtype))
    found = audited(suite)
    assert found.kinds == {8: ["duplicate"]}
    assert found.said[8] == f"has the weights of step 20, rounded to {dtype}"
    # As files of the shorter type hold them.
    short = {name: x.to(getattr(torch, dtype)) for name, x in load_file(weights_file(suite, 8)).items()}
    save_file(short, weights_file(suite, 8))
    assert audited(suite).kinds == {8: ["tensors", "duplicate"]}


def test_the_first_shard_of_the_last_checkpoint_under_two_steps_is_found(suite, audited):
    """As in a published suite, whose branch ``main`` is its last step."""
    shutil.copytree(suite / "step-24", suite / "main")
    # No checkpoint lies before those that have it, nor behind; the ones between tell that it is not frozen.
    for step in (0, 12):
        plant(suite, step, 24, PARTS["block 0 (model.layers.0, 8 tensors) and model.embed_tokens.weight"])
    found = audited(suite)
    assert found.kinds == {0: ["mixed"], 12: ["mixed"]}
    assert found.said[0] == "has block 0 (model.layers.0, 8 tensors) and model.embed_tokens.weight of step 24"
    # Without the step itself the branch tells whose they are.
    shutil.rmtree(suite / "step-24")
    found = audited(suite)
    assert found.kinds == {0: ["mixed"], 12: ["mixed"]}
    assert found.said[12].endswith(" of main")


def test_tensors_that_two_neighbours_share_are_found(suite, audited, capsys, tmp_path):
    """Nothing lies between the two: the tensor moves before and behind, and the others move between."""
    plant(suite, 16, 12, PARTS["block 0 (model.layers.0, 8 tensors)"])
    found = audited(suite)
    assert found.kinds == {16: ["mixed"]}
    assert found.said[16] == "has block 0 (model.layers.0, 8 tensors) of step 12"


@pytest.mark.parametrize("first", [0, 12])
def test_frozen_tensors_are_no_fault(suite, audited, first):
    for step in STEPS:
        if step > first:
            plant(suite, step, first, lambda name: name in (ONE, "model.embed_tokens.weight"))
    found = audited(suite, status=0)
    assert found.kinds == {}
    frozen = f"model.embed_tokens.weight, {ONE} of step 12, step 16, step 20, step 24: frozen, or copied"
    assert found.json["notes"] == ([frozen] if first else [])


def test_types_too_coarse_to_see_training_are_no_fault(suite, audited):
    """In bfloat16 gains stay the same from step to step, and come back to what they were."""
    for step in STEPS:
        tensors = {name: x.to(torch.bfloat16) for name, x in load_file(weights_file(suite, step)).items()}
        save_file(tensors, weights_file(suite, step))
    assert audited(suite, status=0).kinds == {}
    # Buffers are the same everywhere.
    for step in STEPS:
        buffers = {"rotary.inv_freq": 10_000.0 ** -torch.arange(0, 1, 1 / 128), "mask": torch.ones(9, 9).bool().tril()}
        save_file(load_file(weights_file(suite, step)) | buffers, weights_file(suite, step))
    assert audited(suite, status=0).kinds == {}
    plant(suite, 4, 20, PARTS["block 0 (model.layers.0, 8 tensors)"])
    assert audited(suite).said[4] == "has block 0 (model.layers.0, 8 tensors) of step 20"


@pytest.mark.parametrize("whole", [(8,), STEPS[1:]])
def test_a_tensor_that_only_some_hold_as_whole_numbers_is_compared_by_its_type_alone(suite, audited, whole):
    for step in STEPS:
        mask = torch.ones(9, 9).tril()
        tensors = load_file(weights_file(suite, step)) | {"mask": mask.bool() if step in whole else mask}
        save_file(tensors, weights_file(suite, step))
    found = audited(suite)
    odd = whole[0] if len(whole) == 1 else 0
    types = ("BOOL", "F32") if len(whole) == 1 else ("F32", "BOOL")
    assert found.kinds == {odd: ["tensors"]}
    assert found.said[odd] == "mask is {} [9, 9], and {} [9, 9] in most others".format(*types)


def test_where_nothing_tells_whose_tensors_are_both_are_named(suite, audited):
    for step in STEPS[3:]:
        shutil.rmtree(suite / f"step-{step}")
    plant(suite, 8, 0, PARTS["model.embed_tokens.weight"])
    found = audited(suite)
    assert found.kinds == {0: ["mixed"], 8: ["mixed"]}
    assert found.said[0] == "has model.embed_tokens.weight in common with step 8, and nothing tells whose it is"


@pytest.mark.parametrize("steps", [(8, 12), (0, 4), (4, 20), (0, 24)])
def test_exchanged_shards_are_found(suite, audited, steps):
    """No two checkpoints have anything in common then."""
    # Read whole: a file that is mapped would change under its tensors.
    a, b = (load(weights_file(suite, step).read_bytes()) for step in steps)
    moved = [name for name in a if name.startswith("model.layers.0.") or name == "model.embed_tokens.weight"]
    for step, own, other in ((steps[0], a, b), (steps[1], b, a)):
        save_file(own | {name: other[name] for name in moved}, weights_file(suite, step))
    found = audited(suite)
    assert found.kinds == {step: ["mixed"] for step in steps}
    for step, other in (steps, steps[::-1]):
        part = "block 0 (model.layers.0, 8 tensors) and model.embed_tokens.weight"
        assert found.said[step] == f"has {part} exchanged with step {other}"


def test_tensors_of_no_checkpoint_of_the_suite_are_found(suite, other, audited):
    plant(suite, 8, 24, PARTS["block 0 (model.layers.0, 8 tensors)"])
    shutil.rmtree(suite / "step-24")
    found = audited(suite)
    assert found.kinds == {8: ["mixed"]}
    what = "has block 0 (model.layers.0, 8 tensors) off the curve of the rest, and of no checkpoint of the suite: "
    assert found.said[8].startswith(what)
    block = {name: x for name, x in load_file(weights_file(other, 16)).items() if name.startswith("model.layers.1.")}
    save_file(load_file(weights_file(suite, 16)) | block, weights_file(suite, 16))
    found = audited(suite)
    assert found.kinds == {8: ["mixed"], 16: ["mixed"]}
    assert found.said[8].startswith(what)
    assert found.said[16].startswith(what.replace("block 0 (model.layers.0", "block 1 (model.layers.1"))


def test_a_branch_that_was_made_from_a_step_is_no_fault_of_the_step(suite, audited):
    """As one of which a part alone was trained on."""
    shutil.copytree(suite / "step-24", suite / "tuned")
    tensors = load_file(suite / "tuned" / "model.safetensors")
    numbers = torch.Generator().manual_seed(0)
    tensors[ONE] += 0.1 * tensors[ONE].std() * torch.randn(tensors[ONE].shape, generator=numbers)
    save_file(tensors, suite / "tuned" / "model.safetensors")
    assert audited(suite, status=0).kinds == {}
    for step in STEPS[1:]:
        if step < 24:
            shutil.rmtree(suite / f"step-{step}")
    assert audited(suite, status=0).kinds == {}
