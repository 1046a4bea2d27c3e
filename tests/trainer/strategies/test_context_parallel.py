"""Sequences divided among processes: losses and gradients of whole sequences for every arm, and runs, with documents,
padding, accumulation, bf16 and recomputed blocks, that are those of the single process."""

import json
import pickle
from dataclasses import replace

import pytest
from quiet_runs import config_file, logged, run, up_to, weights

from birthmark.errors import UsageError
from birthmark.measure.records import RunDir, Snapshot
from birthmark.models.attention.config import ROWS, CalibrationConfig, LatentConfig
from birthmark.models.config import AttentionConfig, DropoutConfig, ExpertsConfig, ModelConfig
from birthmark.trainer.config import RunConfig, TrainerConfig
from birthmark.trainer.processes.launched_process import LaunchedProcess
from birthmark.trainer.strategies.lightning_setup import check_launch

T, STEPS, HALF = 32, 4, 2

# The mean over the group of losses and gradients, and of the moments that a pass moves, against a pass over whole
# sequences in the same process: by case, the largest difference of losses relative to them, and of gradients relative
# to the norm of all. Then the bytes that the backward pass keeps of a longer sequence, by tensors that the forward pass
# saved, beside those of the whole.
ARMS = """
import pickle, sys, warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from birthmark.models.adapter_config import AdapterConfig
from birthmark.models.adapters import attach, is_adapter
from birthmark.models.birth import born
from birthmark.models.dropout import Dropout, keys_of_samples
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_context_group, join_process_group

warnings.filterwarnings("ignore")
file, out = map(Path, sys.argv[1:])
cases, tokens_BT, documents_BT, long = pickle.loads(file.read_bytes())
with join_process_group(launched_process(), torch.device("cpu")):
    group = join_context_group(dist.get_world_size(), timedelta(seconds=60))

    def passed(config, context, dtype):
        model = born(config, 3).train()
        if dtype in ("prefix", "prefix_plus"):
            attach(model, AdapterConfig(kind=dtype))
            for name, p in model.named_parameters():
                if is_adapter(name):
                    torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
        drops = Dropout(config.dropout, torch.from_numpy(keys_of_samples(0, range(len(tokens_BT)))))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            losses = model(
                tokens_BT[:, :-1].clamp_min(0), targets_BS=tokens_BT[:, 1 + config.attention.first_prediction :],
                z_loss=0.01, context=context,
                dropout=drops if config.dropout.is_on else None,
                documents_BT=documents_BT if config.attention.documents else None,
                global_choices=None if context is None else context.summed,
            )
        losses.objective.backward()
        values = [losses.objective.detach(), losses.cross_entropy, losses.z_loss, *(losses.routing or ())]
        return torch.stack(values), [p.grad for p in model.parameters() if p.requires_grad], [*model.buffers()]

    found = {}
    for name, (config, dtype) in cases.items():
        wanted, (values, gradients, moments) = passed(config, None, dtype), passed(config, group, dtype)
        for tensor in (values, *gradients):
            dist.all_reduce(tensor)
            tensor /= group.size
        size = torch.stack([gradient.norm() for gradient in wanted[1]]).norm()
        found[name] = (
            ((values - wanted[0]) / wanted[0]).abs().max().item(),
            max((a - b).norm().item() for a, b in zip(gradients, wanted[1])) / size.item(),
            max([0.0, *((a - b).abs().max().item() for a, b in zip(moments, wanted[2]))]),
        )

    def kept(config, context):
        model, storages = born(config, 3).train(), {}
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return x

        tokens = torch.zeros(1, config.max_seq_len, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            losses = model(tokens, targets_BS=tokens, context=context)
        return sum(storages.values())

    found["kept"] = {name: [kept(config, group), kept(config, None)] for name, config in long.items()}
    if dist.get_rank() == 0:
        out.write_bytes(pickle.dumps(found))
"""

BASE = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 40, "max_seq_len": T}


def arm(more=None, **attention):
    return ModelConfig(**BASE | {"attention": AttentionConfig(**attention)} | (more or {}))


def calibrated(**calibration):
    return {"aggregation": "calibrated", "calibration": CalibrationConfig(**calibration)}


WHOLE = {"n_kv_heads": None}
EXPERTS = ExpertsConfig(12, 2, renormalise=False, d_ff=12, d_shared=8, n_dense=1, load_balance=0.3, router_z_loss=0.1)
DROPOUT = DropoutConfig(embedding=0.1, residual=0.2, attention=0.3)
#: Normalisers beside the plain one, and the one that needs a norm and a head of keys for each of queries.
OTHERS = [name for name in ROWS if name not in ("softmax", "differential")]
#: Windows of less than a chunk of eight, of a chunk, of more, and of nearly all.
WINDOWS = (1, 3, 8, 9, 20, 31)
ALL = {
    "plain": arm(),
    "learned positions, tied, biases": arm({"positions": "learned", "bias": True, "tie_embeddings": True}),
    **{f"positions {name}": arm({"positions": name}) for name in ("sinusoidal", "alibi", "t5", "none")},
    **{name: arm(normaliser=name) for name in OTHERS},
    "differential": arm(WHOLE, normaliser="differential", aggregation="differential_norm"),
    **{f"window {n}": arm(window=n) for n in WINDOWS},
    **{f"window {n}, documents": arm(window=n, documents=True) for n in WINDOWS},
    "window, alibi": arm({"positions": "alibi"}, window=9),
    "windows by block": arm(window=[None, 5], normaliser="softmax_sink"),
    **{
        f"documents, {name}": arm({"positions": name}, documents=True)
        for name in ("rope", "learned", "sinusoidal", "alibi", "t5")
    },
    "documents, sigmoid": arm(documents=True, normaliser="sigmoid"),
    "documents, sinks": arm(documents=True, normaliser="softmax_sink", kv_bias="key_value"),
    **{f"bias {name}": arm(kv_bias=name) for name in ("key", "value", "key_value")},
    "biases": arm(kv_bias="key_value", kv_bias_tokens=3, normaliser="softmax_sink"),
    "headnorm": arm(aggregation="headnorm"),
    "headnorm_released": arm(aggregation="headnorm_released"),
    **{
        f"{n_eff}, {rho}{', documents' * documents}": arm(
            documents=documents, **calibrated(n_eff=n_eff, correlation=rho)
        )
        for n_eff in ("exact", "analytic")
        for rho in ("none", "estimated", "learned")
        for documents in (False, True)
    },
    "exact, sink": arm(normaliser="softmax_sink", **calibrated(n_eff="exact", direction="attenuate")),
    "gate": arm(gate="channel"),
    "gate by values": arm(gate="head", gate_at="value", gate_input="value"),
    "norms": arm(qk_norm="head", v_norm="head"),
    "latent": arm(WHOLE, latent=LatentConfig(kv_rank=8, q_rank=8)),
    "dropout, documents": arm({"dropout": DROPOUT}, documents=True),
    "experts": arm({"experts": EXPERTS}),
    "blocks without positions": arm(nope_blocks=[1]),
    "parallel": arm({"parallel_residual": True, "logit_softcap": 5.0}),
    # In chunks of eight, and for four processes of four.
    "prefix": arm(prefix=4),
    "prefix, window, sink": arm(prefix=4, window=9, normaliser="softmax_sink"),
    "prefix, softpick": arm(prefix=3, normaliser="softpick"),
    "prefix, experts": arm({"experts": EXPERTS}, prefix=4),
}
BF16 = ("plain", "window 9", "documents, sinks", "exact, none", "headnorm", "biases", "differential")
CASES = {name: (config, "fp32") for name, config in ALL.items()}
CASES |= {f"bf16: {name}": (ALL[name], "bf16") for name in BF16}
CASES |= {f"adapter {kind}": (ALL["headnorm"], kind) for kind in ("prefix", "prefix_plus")}
#: Cases whose code others run as well: four processes alone have them.
MORE = {"relu", "elu", "identity", "positions sinusoidal", "documents, sinusoidal", "documents, learned"}
MORE |= {"headnorm_released"}
MORE |= {f"window {n}{with_documents}" for n in (1, 8, 31) for with_documents in ("", ", documents")}
MORE |= {"bf16: biases", "bf16: headnorm", "analytic, none", "analytic, learned", "exact, learned, documents"}
#: Heads that share keys and values as those of models of this age do, and none that share any.
LONG = {name: arm({"n_kv_heads": n, "max_seq_len": 16384}) for name, n in (("shared", 1), ("each", None))}


def spread(forked, folder, cases, long, n):
    import torch

    tokens_BT = torch.randint(0, 40, (3, T + 1), generator=torch.Generator().manual_seed(0))
    # One document over all chunks, documents that end in the middle of one, and padding.
    numbers = [[0] * T, [0] * 5 + [1] * 3 + [2] * 17 + [-1] * 7, [0] * 10 + [1] * 13 + [2] * 9]
    tokens_BT[1, 25:] = -100
    (folder / "arms.py").write_text(ARMS)
    (folder / "cases").write_bytes(pickle.dumps((cases, tokens_BT, torch.tensor(numbers), long)))
    forked(folder / "arms.py", folder / "cases", folder / "found", n=n)
    return pickle.loads((folder / "found").read_bytes())


@pytest.fixture(scope="module")
def of_two(forked, tmp_path_factory):
    cases = {name: case for name, case in CASES.items() if name not in MORE}
    return spread(forked, tmp_path_factory.mktemp("arms"), cases, {}, 2)


def assert_whole(found, name):
    losses, gradients, moments = found[name]
    of_losses, of_gradients = (1e-3, 2e-2) if name.startswith("bf16") else (1e-6, 1e-5)
    assert losses < of_losses
    assert gradients < of_gradients
    assert moments < 2e-6


@pytest.mark.parametrize("name", [name for name in CASES if name not in MORE])
def test_the_parts_of_an_arm_are_its_whole(name, of_two):
    assert_whole(of_two, name)


@pytest.mark.slow
def test_so_are_four_and_each_keeps_little(forked, tmp_path):
    """At T 16,384 a process of four kept .28 of the bytes of one where four heads of queries shared keys and values,
    and .34 where none did."""
    assert CASES.keys() >= MORE
    found = spread(forked, tmp_path, CASES, LONG, 4)
    for name in CASES:
        assert_whole(found, name)
    shares = {name: part / whole for name, (part, whole) in found["kept"].items()}
    assert all(share <= 0.35 for share in shares.values()), shares


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def config(tiny, write_documents, tmp_path_factory):
    """Documents with padding, in steps of two micro-batches, and weights that move."""
    folder = tmp_path_factory.mktemp("text")
    fields = {"data.path": str(write_documents(folder / "text")), "data.cache_dir": str(folder / "cache")}
    fields |= {"data.val_fraction": 0.2, "data.packing": "documents", "data.bos": "document"}
    fields |= {"model.vocab_size": 280, "model.max_seq_len": 32, "model.attention.documents": True}
    fields |= {"model.attention.normaliser": "softmax_sink", "optim.schedule": "constant", "optim.lr": 0.003}
    fields |= {"trainer.global_batch_size": 4, "trainer.micro_batch_size": 2, "trainer.val_sequences": 7}
    fields |= {"trainer.max_steps": STEPS, "trainer.checkpoint_every": HALF, "snapshot.n_sequences": 11}
    return tiny(fields)


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    config_file(folder / "run.yaml", config)
    return folder


@pytest.fixture(scope="module")
def single(config, folder):
    return run(config, folder / "single")


WAYS = {
    "ddp": ["--trainer.strategy=ddp"],
    "fsdp2": ["--trainer.strategy=fsdp2", "--trainer.activation_checkpointing=full"],
    "selective": ["--trainer.strategy=fsdp2", "--trainer.activation_checkpointing=selective"],
}
WAYS["bf16"] = [*WAYS["fsdp2"], "--trainer.precision=bf16", "--snapshot.enabled=false"]


def launch(launch_runs, folder, ways, n=2):
    runs = {name: (folder / name, False, ["--trainer.context_parallel=2", *flags]) for name, flags in ways.items()}
    launch_runs(folder / "run.yaml", [*runs.values()], n=n)
    return {name: RunDir.open(path) for name, (path, *_) in runs.items()}


@pytest.fixture(scope="module")
def runs(folder, single, launch_runs):
    return launch(launch_runs, folder, WAYS)


def assert_alike(run, single, rel=1e-5):
    digests = [json.loads(one.birth.read_text())["digest"] for one in (run, single)]
    assert digests[0] == digests[1]
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        found = logged(run, key)
        assert found == pytest.approx(logged(single, key), rel=rel if key != "train/grad_norm" else 10 * rel), key
        assert len(found) >= 2
    births = [Snapshot.read(one.snapshot(0)).bias for one in (run, single)]
    assert births[0] == pytest.approx(births[1], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "bf16"])
def test_a_run_has_the_birth_losses_and_snapshots_of_the_single_process(way, runs, single):
    assert_alike(runs[way], single)


def test_in_bf16_too_but_for_its_rounding(runs, single):
    losses = logged(runs["bf16"], "train/loss")
    assert losses == pytest.approx(logged(single, "train/loss"), rel=3e-3)
    assert len(losses) == STEPS


def test_a_run_goes_on_with_whole_sequences(config, runs, single, folder):
    half = run(config, up_to(HALF, runs["fsdp2"], folder / "half").path, resume=True)
    assert logged(half, "train/loss") == pytest.approx(logged(single, "train/loss"), rel=1e-5)


@pytest.mark.slow
def test_blocks_are_compiled_in_two_graphs(folder, single, launch_runs):
    """Documents, padding, a sink, and accumulation."""
    found = launch(launch_runs, folder, {"compiled": ["--trainer.strategy=fsdp2", "--trainer.compile=blocks"]})
    assert_alike(found["compiled"], single)


@pytest.mark.slow
def test_zero_divides_sequences_too(folder, single, launch_runs):
    ways = {name: [f"--trainer.strategy={name}"] for name in ("zero1", "zero2")}
    for found in launch(launch_runs, folder, ways).values():
        assert_alike(found, single)


@pytest.mark.slow
def test_four_processes_share_one_sequence_or_two_each_and_go_on_as_one_and_two(config, folder, single, launch_runs):
    two = ["--trainer.strategy=fsdp2"]
    four = [*two, "--trainer.context_parallel=4"]
    found = launch(launch_runs, folder, {"four": four, "two by two": two, "with ddp": ["--trainer.strategy=ddp"]}, n=4)
    for one in found.values():
        assert_alike(one, single)
    # Four parts up to step 2, whole sequences in step 3, two parts in step 4.
    chain = up_to(HALF, found["four"], folder / "chain")
    run(replace(config, trainer=replace(config.trainer, max_steps=3)), chain.path, resume=True)
    launch_runs(folder / "run.yaml", [(chain.path, True, ["--trainer.context_parallel=2", *two])], n=2)
    assert logged(chain, "train/loss") == pytest.approx(logged(single, "train/loss"), rel=1e-5)
    found, whole = (weights(one, STEPS) for one in (chain, single))
    assert max((found[name] - whole[name]).abs().max().item() for name in whole) < 1e-5


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("trainer", "model", "words"),
    [
        ({"context_parallel": 3}, {}, "3, but model.max_seq_len 32 is no multiple of 6"),
        ({"context_parallel": 2}, {"attention": AttentionConfig(prefix=9)}, "prefix 9 see later ones, .* of 8 at most"),
        (
            {"context_parallel": 2},
            {"attention": AttentionConfig(aggregation="mine:Mean")},
            "model.attention.aggregation mine:Mean is a class of your own",
        ),
        ({"context_parallel": 2, "compile": "step"}, {}, "trainer.compile is step, .*: give blocks"),
        (
            {"context_parallel": 2, "compile": "blocks", "activation_checkpointing": "full"},
            {},
            "trainer.compile is blocks, .* trainer.activation_checkpointing full makes one graph each",
        ),
        ({"context_parallel": 2, "strategy": "zero3"}, {}, "which strategy zero3 does not read"),
        ({"context_parallel": 2, "strategy": "single"}, {}, "which strategy single does not read"),
        ({"context_parallel": 0}, {}, "trainer.context_parallel is 0"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(trainer, model, words):
    with pytest.raises(UsageError, match=words) as caught:
        RunConfig(trainer=TrainerConfig(**{"strategy": "ddp"} | trainer), model=ModelConfig(**BASE | model))
    assert "\n" not in str(caught.value)


def test_a_group_that_does_not_divide_the_processes_is_refused():
    config = TrainerConfig(strategy="ddp", context_parallel=4, global_batch_size=8)
    with pytest.raises(UsageError, match=r"context_parallel 4 does not divide 6 processes: change one of them"):
        check_launch(config, LaunchedProcess(0, 6, 0, 6))
    # One batch of two sequences is enough for two groups of four.
    smaller = TrainerConfig(strategy="ddp", context_parallel=4, global_batch_size=2, micro_batch_size=2)
    assert smaller.shared_by(8).micro_batch_size == 1
    assert check_launch(smaller, LaunchedProcess(0, 8, 0, 8)) is not None
