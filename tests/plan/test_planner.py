"""Plans of a run: memory, time and traffic, against counts by hand and torch's own counters."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console
from small_llama import BLOCK, OUTSIDE
from torch.utils.flop_counter import FlopCounterMode

from birthmark.errors import UsageError
from birthmark.models.birth import born
from birthmark.models.decoder import Decoder
from birthmark.plan.cluster import Cluster
from birthmark.plan.planner import MARGIN, Planner, best, budget, with_strategy
from birthmark.plan.strategy_costs import STRATEGY_COSTS
from birthmark.plan.table import print_upkeep, upkeep
from birthmark.plan.tracing import Ring
from birthmark.trainer.config import OptimConfig, TrainerConfig
from birthmark.trainer.gpu_specs import GPUS
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.strategies.table import STRATEGIES


def flops_of_a_pass(config, checkpointing):
    """Counted by torch as three sequences run forward and backward on CPU, without attention's kernel, which it counts
    from version 2.15 on.
    """
    trainer = TrainerConfig(activation_checkpointing=checkpointing)
    module = PretrainModule(born(config.model, 0).train(), OptimConfig(), trainer)
    with FlopCounterMode(display=False) as counter:
        module.model(torch.zeros(3, config.model.max_seq_len, dtype=torch.long)).sum().backward()
    by_operator = counter.get_flop_counts()["Global"]
    return sum(flops for operator, flops in by_operator.items() if "attention" not in str(operator))


@pytest.mark.heavy
@pytest.mark.parametrize("placement", ["pre", "both"])
def test_what_is_computed_again_is_what_torch_counts(llama, placement):
    config = llama({"trainer.precision": "fp32", "model.norm_placement": placement})
    planner = Planner(config, Cluster(1, "h100-80gb"))
    plain, again = (planner.plan(with_strategy(config.trainer, "single", kind)) for kind in ("none", "full"))
    assert plain.flops_again == 0
    assert again.flops == plain.flops
    counted = [flops_of_a_pass(config, kind) / (3 * 32) for kind in ("none", "full")]
    # Torch counts no gains, which are no matrices.
    tokens, attention, gains = 64 * 32, 2 * 4 * 4 * 16 * 32, 2 * (1 + 2 * {"pre": 2, "both": 4}[placement]) * 64
    assert plain.flops / tokens == counted[0] + 3 * (attention + gains)
    assert again.flops_again / tokens == counted[1] - counted[0] + attention + gains


@pytest.mark.heavy
def test_times_follow_from_the_stated_share_of_the_peak(llama):
    config = llama({"trainer.strategy": "fsdp2", "trainer.activation_checkpointing": "full"})
    planner = Planner(config, Cluster(16, "a100-80gb", mfu=0.5, bandwidth=1e9))
    plan = planner.plan()
    assert plan.step_seconds == pytest.approx((plan.flops + plan.flops_again) / (16 * 0.5 * 312e12))
    assert plan.sending_seconds == pytest.approx(plan.sent / 8e9)  # eight ports of a machine
    # Ports as slow as these set the pace. Of quicker ones a share is not hidden, and none within one machine.
    assert plan.whole_seconds == plan.sending_seconds == plan.between_seconds > plan.step_seconds
    quick = dataclasses.replace(planner, cluster=Cluster(16, "a100-80gb", mfu=1e-5, exposed=0.25)).plan()
    assert quick.whole_seconds == pytest.approx(quick.step_seconds + plan.sent / 4 / 300e9)
    speeds = [budget(quick, config, Cluster(16, "a100-80gb"), 1e9, 1).tokens_per_second]
    assert speeds == [pytest.approx(config.trainer.global_batch_size * 32 / quick.whole_seconds)]
    one = Planner(config, Cluster(8, "a100-80gb", mfu=1e-5)).plan()
    assert (one.between_seconds, one.whole_seconds) == (0, one.step_seconds)
    # Published shares of the peak.
    speeds = [Cluster(16, "a100-80gb").speed("bf16", compile) for compile in ("no", "step", "blocks")]
    assert speeds == [pytest.approx(16 * share * 312e12) for share in (0.34, 0.39, 0.39)]


#: Processes of a collective on machines of eight H100 (link 450 GB/s, a port of 50 GB/s each), and bytes per second of
#: one of them: a ring of n sends n − 1 of n parts over each of its hops at once, and its slowest hop sets the pace.
RINGS = [
    (8, Ring(8), 450e9),
    (64, Ring(8), 450e9),  # shards of HSDP, within a machine
    (64, Ring(64), 400e9),  # a machine's ring leaves through all of its ports, a part of the data through each
    (64, Ring(8, 8), 50e9),  # replicas of HSDP: eight such rings share a machine, one port for each
    (64, Ring(16, 4), 100e9),
    (64, Ring(2, 4), 450e9),
    (64, Ring(4, 2), 450e9),
]


@pytest.mark.parametrize(("n_gpus", "ring", "expected"), RINGS)
def test_a_ring_sends_as_fast_as_its_links_within_a_machine_and_its_ports_between(n_gpus, ring, expected):
    cluster = Cluster(n_gpus, "h100-80gb")
    assert cluster.rate(ring) == expected
    assert cluster.seconds({ring: expected}) == 1.0
    # As the hops of all of the machine's rings share its ports.
    machine = [rank // 8 for rank in range(0, ring.size * ring.stride, ring.stride)]
    if len(set(machine)) > 1:
        members = machine.count(0)
        rings_of_a_machine = 8 // members
        assert expected == min(450e9, 8 * 50e9 / rings_of_a_machine)


def test_a_port_that_is_named_counts_between_machines_and_within_one_it_is_the_link():
    assert Cluster(64, "h100-80gb", bandwidth=10e9).rate(Ring(64)) == 80e9
    assert Cluster(64, "h100-80gb", bandwidth=10e9).rate(Ring(8)) == 450e9
    assert Cluster(8, "h100-80gb", bandwidth=10e9).rate(Ring(8)) == 10e9


@pytest.mark.heavy
def test_replicas_that_shard_within_machines_are_among_the_alternatives_and_send_less_between(llama):
    planner = Planner(llama({"trainer.strategy": "fsdp2", "trainer.gather": "fp32"}), Cluster(64, "h100-80gb"))
    trainers = [t for t in planner.alternatives() if (t.strategy, t.activation_checkpointing) == ("fsdp2", "none")]
    assert [trainer.replicas for trainer in trainers] == [1, 8]
    plans = [planner.plan(dataclasses.replace(trainer, micro_batch_size=1)) for trainer in trainers]
    whole = 4 * (2 * BLOCK + OUTSIDE)
    within, between = 7 / 8 * (2 * whole + 4 * 2 * BLOCK), 2 * 7 / 8 * whole / 8
    assert plans[1].sent == pytest.approx(within + between, rel=1e-3)
    assert plans[1].sending_seconds == pytest.approx(within / 450e9 + between / 50e9, rel=1e-3)
    # Where machines have slow ports it is the best of the two.
    slow = dataclasses.replace(planner, cluster=Cluster(64, "h100-80gb", bandwidth=1e9))
    found = [slow.plan(dataclasses.replace(trainer, micro_batch_size=1)) for trainer in trainers]
    assert best(found) is found[1]


def test_checkpoints_are_their_tensors_and_each_process_writes_its_part(llama):
    config = llama()
    whole, planner = 4 * (2 * BLOCK + OUTSIDE), Planner(config, Cluster(16, "h100-80gb"))
    parts = {"ddp": (3, 3), "zero1": (1 + 2 / 16, 1 + 8 * 2 / 16), "fsdp2": (3 / 16, 8 * 3 / 16)}
    for strategy, (part, machine) in parts.items():
        found = upkeep(planner, with_strategy(config.trainer, strategy, "none"), 1e9)
        assert found.checkpoint == 3 * whole
        assert found.checkpoint_part == pytest.approx(part * whole)
        assert found.copying_seconds == pytest.approx(part * whole / 25e9)
        assert found.host_per_node == pytest.approx(machine * whole)
        assert found.writing_seconds == pytest.approx(machine * whole / 1e9)
    replicas = dataclasses.replace(with_strategy(config.trainer, "fsdp2", "none"), replicas=2)
    assert upkeep(planner, replicas, 1e9).checkpoint_part == pytest.approx(3 / 8 * whole)
    assert found.snapshot_seconds > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_without_snapshots_has_no_row_of_them(llama, enabled):
    config, out = llama({"snapshot.enabled": enabled}), io.StringIO()
    found = upkeep(Planner(config, Cluster(8, "h100-80gb")), config.trainer, 1e9)
    assert ((found.snapshot_memory is None), (found.snapshot_seconds is None)) == (not enabled, not enabled)
    print_upkeep(found, Console(file=out))
    assert ("snapshot" in out.getvalue()) == enabled
    assert "a checkpoint" in out.getvalue()


def test_every_strategy_has_its_costs():
    assert STRATEGY_COSTS.keys() == STRATEGIES.keys()
    assert all((STRATEGY_COSTS[name].shard is not None) == facts.shards_weights for name, facts in STRATEGIES.items())


@pytest.mark.heavy
def test_states_are_sharded_as_each_strategy_says(llama):
    config = llama()
    whole, n = 4 * (2 * BLOCK + OUTSIDE), 8
    planner = Planner(config, Cluster(n, "h100-80gb"))
    wanted = {
        "ddp": (whole, 2 * whole), "fsdp2": (whole / n, 2 * whole / n), "zero1": (whole, 3 * whole / n),
        "zero2": (whole, 3 * whole / n), "zero3": (whole / n, 2 * whole / n),
    }  # fmt: skip
    plans = {name: planner.plan(with_strategy(config.trainer, name, "none")) for name in wanted}
    for name, (parameters, optimizer) in wanted.items():
        parts = plans[name].parts
        assert (parts["parameters"], parts["optimizer"]) == pytest.approx((parameters, optimizer), rel=1e-3), name
    # Four micro-batches: of DDP gradients beside their buckets.
    assert plans["ddp"].parts["gradients"] == 2 * whole
    assert plans["ddp"].sent == 2 * 7 / 8 * whole
    offloaded = planner.plan(dataclasses.replace(with_strategy(config.trainer, "zero3", "none"), offload="cpu"))
    assert offloaded.parts["parameters"] == offloaded.parts["optimizer"] == 0
    assert offloaded.host_per_node == pytest.approx(6 * whole)  # all eight parts
    assert plans["zero3"].host_per_node == 0


@pytest.mark.heavy
def test_an_optimizer_with_one_moment_needs_less_memory_under_every_strategy(llama):
    config = llama({"trainer.strategy": "ddp", "trainer.global_batch_size": 64, "optim.name": "sgd"})
    planner, whole = Planner(config, Cluster(8, "h100-80gb")), 4 * (2 * BLOCK + OUTSIDE)
    for strategy, expected in (("ddp", whole), ("fsdp2", whole / 8), ("zero2", 2 * whole / 8), ("zero3", whole / 8)):
        found = planner.plan(with_strategy(config.trainer, strategy, "none")).parts["optimizer"]
        assert found == pytest.approx(expected, rel=1e-3), strategy
    offloaded = planner.plan(dataclasses.replace(with_strategy(config.trainer, "zero3", "none"), offload="cpu"))
    assert offloaded.host_per_node == pytest.approx(5 * whole)


def test_state_in_bf16_is_planned_at_half_of_it(llama):
    config, whole = llama({"optim.state_dtype": "bf16"}), 4 * (2 * BLOCK + OUTSIDE)
    planner = Planner(config, Cluster(8, "h100-80gb"))
    for strategy, expected in (("ddp", whole), ("fsdp2", whole / 8)):
        found = planner.plan(with_strategy(config.trainer, strategy, "none")).parts["optimizer"]
        assert found == pytest.approx(expected, rel=3e-3), strategy  # with a step count per parameter
    assert planner.state_bytes == whole


@pytest.mark.heavy
def test_muon_gathers_every_matrix_once_more_in_the_update(llama):
    config, cluster = {"trainer.strategy": "fsdp2", "trainer.global_batch_size": 64}, Cluster(2, "h100-80gb")
    muon, adamw = (Planner(llama({**config, "optim.name": name}), cluster) for name in ("muon", "adamw"))
    with torch.device("meta"):
        model = Decoder(muon.config.model)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n)
    assert muon.plan().sent - adamw.plan().sent == pytest.approx(4 * matrices / 2, rel=1e-6)
    assert adamw.state_bytes - muon.state_bytes == 4 * matrices


def test_an_optimizer_that_cannot_be_rehearsed_is_named(llama):
    with pytest.raises(UsageError, match=r"optim\.name is adafactor, whose steps depend on values"):
        Planner(llama({"optim.name": "adafactor"}), Cluster(1, "h100-80gb")).plan()


def test_one_micro_batch_needs_no_gradients_beside_buckets(llama):
    config = llama({"trainer.strategy": "ddp", "trainer.global_batch_size": 16})
    plan = Planner(config, Cluster(8, "h100-80gb")).plan()
    assert plan.accumulate == 1
    assert plan.parts["gradients"] == 4 * (2 * BLOCK + OUTSIDE)


@pytest.mark.heavy
def test_the_largest_micro_batch_that_fits_is_found(llama):
    config = llama({"trainer.strategy": "fsdp2", "model.n_layers": 4})
    roomy = Planner(config, Cluster(8, "h100-80gb"))
    plans = [roomy.plan(dataclasses.replace(config.trainer, micro_batch_size=size)) for size in (1, 2, 4, 8)]
    assert sorted(plan.peak for plan in plans) == [plan.peak for plan in plans]
    found = []
    for between in ((plans[1].peak + plans[2].peak) / 2, (1 - MARGIN) * plans[0].peak - 1):
        usable = between / (1 - MARGIN) / GPUS["h100-80gb"].memory
        narrow = dataclasses.replace(roomy, cluster=Cluster(8, "h100-80gb", usable=usable))
        found.append(narrow.largest(config.trainer))
    assert (found[0].micro_batch_size, found[0].fits) == (2, True)
    assert (found[1].micro_batch_size, found[1].fits) == (1, False)
    assert best(found) is found[0]
    assert best(found[1:]) is None


@pytest.mark.heavy
def test_the_best_alternative_computes_and_sends_least(llama):
    config = llama({"trainer.strategy": "fsdp2", "model.n_layers": 1})
    planner = Planner(config, Cluster(8, "h100-80gb"))
    plans = [planner.largest(trainer) for trainer in planner.alternatives()]
    kinds = {(plan.strategy, plan.activation_checkpointing) for plan in plans}
    assert kinds >= {("ddp", "none"), ("fsdp2", "selective"), ("zero3", "full")}
    assert ("zero3", "selective") not in kinds  # refused by the config
    assert ("single", "none") not in kinds
    longest = {id(plan): max(plan.step_seconds, plan.sending_seconds) for plan in plans}
    assert longest[id(best(plans))] == min(longest.values())


@pytest.mark.heavy
def test_a_divided_sequence_takes_part_of_the_activations_and_sends_keys_and_values(llama):
    config = llama({"trainer.strategy": "fsdp2", "trainer.precision": "bf16", "trainer.global_batch_size": 4})
    planner, model = Planner(config, Cluster(4, "h100-80gb")), config.model
    trainers = [dataclasses.replace(config.trainer, micro_batch_size=1, context_parallel=size) for size in (1, 2, 4)]
    plans = [planner.plan(trainer) for trainer in trainers]
    assert [plan.accumulate for plan in plans] == [1, 2, 4]
    for size, trainer, plan in zip((1, 2, 4), trainers, plans, strict=True):
        # Keys and values in bf16, forward and backward: a ring sends all parts but one.
        whole = 2 * 2 * model.kv_heads * model.d_head * model.max_seq_len * model.n_layers
        curve = planner._curve(trainer)
        sent = [sum(curve.messages_per_sequence[f"first {way}"].values()) for way in ("forward", "backward")]
        assert sent == [whole * (size - 1) / size] * 2
        held = curve.per_sequence.max() / planner._curve(trainers[0]).per_sequence.max()
        # Beside its part, the keys and values of the other parts: as gathered, and once more in the kernels' layout.
        gathered = (1 - 1 / size) * whole / planner._curve(trainers[0]).per_sequence.max()
        assert 1 / size <= held <= 1 / size + 2 * gathered
        assert plan.context_parallel == size


def test_groups_that_divide_sequences_are_planned_for_long_ones(llama):
    def sizes(n_gpus, **fields):
        config = llama({"trainer.strategy": "fsdp2", **{name.replace("__", "."): x for name, x in fields.items()}})
        trainers = Planner(config, Cluster(n_gpus, "h100-80gb")).alternatives()
        return sorted({trainer.context_parallel for trainer in trainers})

    assert sizes(8, trainer__global_batch_size=8) == [1]
    assert sizes(8, trainer__global_batch_size=8, model__max_seq_len=1 << 17) == [1, 2, 4, 8]
    # As many groups as sequences at most.
    assert sizes(64, trainer__global_batch_size=8, model__max_seq_len=1 << 17) == [1, 8, 16, 32, 64]
    assert sizes(8, trainer__global_batch_size=8, trainer__context_parallel=2) == [1, 2, 4, 8]
