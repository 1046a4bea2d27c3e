"""Rehearsals of a micro-batch on a GPU that is not there, against counts by hand."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_llama import BLOCK, HEAD, OUTSIDE, TABLE
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import birthmark
from birthmark import kernel_devices
from birthmark.plan.cluster import Cluster
from birthmark.plan.planner import Planner
from birthmark.plan.rehearsal import KERNELS, WIDE, rehearse
from birthmark.plan.tracing import Ledger
from birthmark.trainer.strategies import fsdp2


@pytest.mark.heavy
@pytest.mark.parametrize(("residual", "n_bytes"), [("fp32", 4), ("bf16", 2)])
def test_a_block_keeps_on_a_gpu_what_a_hand_counts(llama, residual, n_bytes):
    def kept(n_layers):
        curve = rehearse(llama({"model.n_layers": n_layers, "trainer.residual": residual}), 1, device="cuda")
        # At the end of the forward pass, all activations are there.
        return curve.per_sequence[curve.during("first forward")][-1]

    # Of a token, in bytes: two residual streams, each with its norm's scale in float32; in bf16 what each norm gives,
    # once for all maps that read it, queries and keys once turned, values, and what attention gives, laid out as the
    # next map reads it; in the MLP's width gate, up and their product; attention's log-sum-exps.
    d, ff, heads, tokens = 64, 96, 4, 32
    by_hand = 2 * (n_bytes * d + 4) + 2 * (2 + 2 + 1 + 1) * d + 2 * 3 * ff + 4 * heads
    assert kept(3) - kept(2) == kept(2) - kept(1) == tokens * by_hand


@pytest.mark.heavy
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("sharded", [False, True])
def test_one_rehearsal_knows_every_micro_batch(llama, sharded, checkpointing):
    fields = {"trainer.activation_checkpointing": checkpointing, "trainer.strategy": "fsdp2" if sharded else "single"}
    config = llama(fields)
    n, shard = (8, fsdp2.sharder) if sharded else (1, None)
    of_all = rehearse(config, n, shard=shard, device="cuda")
    of_three = rehearse(config, n, shard=shard, device="cuda", micro_batch_size=3)
    assert not of_three.per_sequence.any()
    assert (of_all.at(3) == of_three.at(3)).all()
    assert of_all.sent == of_three.sent


@pytest.fixture
def eight_processes():
    """Rank 0 of a process group of eight, of which no other exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def test_results_of_a_shard_are_counted_alone(eight_processes):
    """Though torch infers their shapes from whole tensors."""
    with FakeTensorMode() as mode, Ledger(mode, 1) as ledger:
        x = DTensor.from_local(torch.ones(100, 3), eight_processes, [Shard(0)])
        assert x.shape == (800, 3)
        ledger.begin("update")
        kept = [x.add(1), x.mul(2), x.neg()]
        held = ledger.curve().fixed.sum(1)
    assert held.tolist() == [4 * 300 * (1 + n) for n in range(1, len(kept) + 1)]


@pytest.mark.heavy
def test_a_sharded_model_holds_and_sends_its_shard(llama):
    n, config = 8, llama({"trainer.strategy": "fsdp2", "trainer.gather": "fp32"})
    curve = rehearse(config, n, shard=fsdp2.sharder, device="cuda")
    whole = 4 * (2 * BLOCK + OUTSIDE)
    at_rest = curve.fixed[curve.during("update")][-1]
    # Of each of the 21 parameters, AdamW counts its steps in one number.
    assert list(at_rest[:3]) == [whole / n, whole / n, 2 * whole / n + 4 * 21]
    ring = (n - 1) / n
    for nth in ("first", "later"):
        assert curve.sent[f"{nth} forward"] == ring * whole
        # The head stays gathered, and a table's gradient needs none of it; gradients are all sent.
        assert curve.sent[f"{nth} backward"] == ring * (whole + 4 * 2 * BLOCK)


@pytest.mark.heavy
def test_gradients_that_are_summed_whole_are_sent_once(llama):
    n, config = 8, llama({"trainer.strategy": "fsdp2", "trainer.gather": "fp32"})
    curve = rehearse(config, n, shard=fsdp2.sharder, device="cuda", whole=True)
    whole, ring = 4 * (2 * BLOCK + OUTSIDE), 7 / 8
    assert curve.sent["first backward"] == ring * 4 * 2 * BLOCK
    assert curve.sent["later backward"] == ring * (whole + 4 * 2 * BLOCK)
    # Between the two, all gradients and no shards of them.
    assert curve.fixed[curve.during("later forward")][0][1] == whole
    planner = Planner(config, Cluster(n, "h100-80gb"))
    trainers = (dataclasses.replace(config.trainer, accumulate=kind) for kind in ("sharded", "whole"))
    apart, once = map(planner.plan, trainers)
    assert apart.accumulate == once.accumulate == 4
    assert apart.sent - once.sent == pytest.approx(3 * ring * whole)
    assert once.peak - apart.peak == pytest.approx(whole, rel=0.2)


@pytest.mark.heavy
def test_no_more_is_gathered_at_once_than_two_groups(llama):
    fields = {"trainer.strategy": "fsdp2", "trainer.gather": "fp32", "model.vocab_size": 8192, "model.n_layers": 4}
    curve = rehearse(llama(fields), 8, shard=fsdp2.sharder, device="cuda")
    table, gathered = 4 * 8192 * 64, curve.fixed[:, 3]
    # One that computes and one that comes: a table and a block, with the buffer of its collective and its shard.
    forward = gathered[curve.during("first forward")].max()
    assert table + 4 * BLOCK < forward < 2 * table + 2 * 4 * BLOCK + 4 * 64 + table / 8
    # Between the passes of the tables that are left: blocks alone.
    blocks = gathered[curve.during("first forward")]
    assert sorted(blocks)[len(blocks) // 2] < 4 * 4 * BLOCK


@pytest.mark.heavy
def test_replicas_of_a_sharded_model_reduce_their_shards(llama):
    fields = {"trainer.strategy": "fsdp2", "trainer.gather": "fp32"}
    configs = [llama(fields | {"trainer.replicas": replicas}) for replicas in (1, 4)]
    curves = [rehearse(config, 8, shard=fsdp2.sharder, device="cuda") for config in configs]
    whole = 4 * (2 * BLOCK + OUTSIDE)
    # Half of the gradients, between four: a ring sends three quarters of it twice.
    assert curves[1].sent["first backward"] == 1 / 2 * (whole + 4 * 2 * BLOCK) + 2 * 3 / 4 * whole / 2
    assert list(curves[1].fixed[-1][:2]) == [whole / 2, whole / 2]


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_weights_gathered_in_bf16_and_gradients_reduced_so_take_half_but_for_the_embeddings(llama, reduce):
    config = llama({"trainer.strategy": "fsdp2", "trainer.reduce": reduce})
    assert config.trainer.gathers_in == "bf16"  # as precision is
    curve = rehearse(config, 8, shard=fsdp2.sharder, device="cuda")
    assert curve.sent["first forward"] == 7 / 8 * (2 * (2 * BLOCK + HEAD) + 4 * TABLE)
    sent = {"fp32": 4, "bf16": 2}[reduce] * (2 * BLOCK + OUTSIDE)
    assert curve.sent["first backward"] == 7 / 8 * (2 * 2 * BLOCK + sent)


def test_a_table_that_is_head_too_is_gathered_once(llama):
    config = llama({"trainer.strategy": "fsdp2", "model.tie_embeddings": True})
    curve = rehearse(config, 8, shard=fsdp2.sharder, device="cuda")
    assert curve.sent["first forward"] == 7 / 8 * (2 * 2 * BLOCK + 4 * HEAD)
    assert curve.sent["first backward"] == 7 / 8 * (2 * 2 * BLOCK + 4 * (2 * BLOCK + HEAD))


@pytest.mark.heavy
def test_nothing_is_left_behind(llama):
    resize = torch.UntypedStorage.resize_
    rehearse(llama({"trainer.strategy": "fsdp2"}), 4, shard=fsdp2.sharder, device="cuda")
    assert torch.UntypedStorage.resize_ is resize
    assert kernel_devices.chosen_for is None
    assert not dist.is_initialized()


ARMS = {
    "t5": {"positions": "t5"},
    "alibi": {"positions": "alibi"},
    "window": {"attention.window": 8},
    "prefix": {"attention.prefix": 4},
    "sigmoid": {"attention.normaliser": "sigmoid"},
    "learned sink": {"attention.normaliser": "softmax_sink"},
    "key and value": {"attention.kv_bias": "key_value"},
    "exact": {"attention.aggregation": "calibrated", "attention.calibration.n_eff": "exact"},
    "head norm, gate": {"attention.aggregation": "headnorm", "attention.gate": "channel"},
    "GPT-2": {"norm": "layernorm", "bias": True, "positions": "learned", "tie_embeddings": True, "mlp": "gelu"},
    "dropout": {"dropout.embedding": 0.1, "dropout.residual": 0.1, "dropout.attention": 0.1},
    "experts": {"experts.n_experts": 8, "experts.n_dense": 1, "experts.d_shared": 32},
}


@pytest.mark.heavy
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_can_be_planned(llama, arm):
    config = llama({f"model.{name}": value for name, value in ARMS[arm].items()})
    planner = Planner(config, Cluster(1, "h100-80gb"))
    # cuBLAS gets 32 MiB in each of two threads on an H100, whatever the model.
    least = 16 * planner.n_params + 2 * 32 * 2**20
    assert least < planner.plan().peak < least + 20e6


# ---------------------------------------------------------------- stand-ins of a GPU, against torch itself

ROOT = Path(birthmark.__file__).parent


def registered():
    """Functions that autocast treats on a GPU and leaves alone on a CPU, from torch's own registry."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            treats = torch._C._dispatch_has_kernel_for_dispatch_key
            if treats(name, "AutocastCUDA") and not treats(name, "AutocastCPU"):
                found.add(name.removeprefix("aten::").partition(".")[0])
    return found


#: Of these, a GPU's autocast makes arguments alike in place of making them wide (torch's documentation of amp); the
#: products of einsum are narrow on both, and so are fused attentions.
OTHERS = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "scatter_add", "einsum"}
OTHERS |= {"_scaled_dot_product_flash_attention"}


def test_wide_functions_are_those_of_a_gpus_autocast():
    # torch 2.11 has no RMSNorm among them; models give it float32, or turn autocast off.
    later = {"rms_norm"} if torch.__version__ < "2.12" else set()
    assert registered() >= WIDE - later
    used = set()
    for file in (ROOT / "models").rglob("*.py"):
        used |= {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    assert (registered() - OTHERS) & used <= WIDE


def test_the_fused_kernels_keep_the_shapes_that_they_replace():
    q_BHTK, k_BHTK, v_BHTK = torch.randn(3, 2, 4, 6, 8).unbind()
    calls = {"scaled_dot_product_attention": (q_BHTK, k_BHTK, v_BHTK), "rms_norm": (q_BHTK, (8,), torch.ones(8))}
    for name, arguments in calls.items():
        real = getattr(torch.nn.functional, name)(*arguments)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            stand_in = KERNELS[name](*fake)
        assert (stand_in.shape, stand_in.dtype) == (real.shape, real.dtype)
