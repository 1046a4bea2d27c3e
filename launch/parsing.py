"""The command line's grammar: every command with its options, and config files read through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .. import __version__
from ..study.lineage.test_options import add_test_options
from ..trainer.config_parser import Parser, add_run_fields


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line's parser, and its commands' by name."""
    parser = Parser(prog="birthmark", description="Pretrain transformers and see the mark they were born with.")
    parser.add_argument("--version", action="version", version=f"birthmark {__version__}")
    commands = parser.add_subcommands(dest="command")

    pretrain = Parser(
        usage="birthmark pretrain [--config YAML | --resume RUN] [--FIELD VALUE ...]",
        description="Train a model and snapshot its biases at birth and at every checkpoint.",
    )
    pretrain.add_argument("--resume", type=str | None, metavar="RUN", help="Go on with the run in this folder.")
    pretrain.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    add_run_fields(pretrain)
    commands.add_subcommand("pretrain", pretrain, help=pretrain.description)

    report = Parser(description="Write the page of a run, of several side by side, or of one snapshot.")
    report.add_argument(
        "runs",
        type=str,
        nargs="+",
        metavar="RUN",
        help="Folders that `pretrain` or a callback wrote, or one of `snapshot --out`.",
    )
    report.add_argument("--step", type=int | None, metavar="N", help="The page of this snapshot of the run alone.")
    report.add_argument(
        "--out",
        type=str | None,
        help="HTML file; by default RUN/report.html, in the snapshot's folder, or ./report.html for several runs.",
    )
    report.add_argument("--json", action="store_true", help="Print the figures as JSON; no page is written.")
    report.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("report", report, help=report.description)
    describe = Parser(description="Tell what a model is made of, without allocating it.")
    describe.add_argument("config", type=str, metavar="CONFIG", help="YAML file of a run or of a model.")
    describe.add_argument("--json", action="store_true", help="Print it as JSON.")
    describe.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("describe", describe, help=describe.description)

    plan = Parser(description="Tell whether a run fits on a cluster and what it takes there (docs/cluster.md).")
    plan.add_argument("config", type=str, metavar="CONFIG", help="YAML file of a run.")
    plan.add_argument("--n_gpus", type=int, required=True, metavar="N", help="GPUs, each with one process.")
    plan.add_argument(
        "--gpu",
        type=str,
        default="h100-80gb",
        help="h100-80gb, h100-pcie-80gb, h200-141gb, b200-192gb, a100-40gb, a100-80gb, l40s-48gb, rtx4090-24gb; cpu: "
        "processes on this machine.",
    )
    plan.add_argument("--gpus_per_node", type=int, default=8, metavar="N", help="GPUs in one machine.")
    plan.add_argument(
        "--strategy", type=str | None, metavar="NAME", help="In place of the config's; see trainer.strategy."
    )
    plan.add_argument("--set", type=str, nargs="+", default=[], metavar="FIELD=VALUE", help="Change the config.")
    plan.add_argument("--mfu", type=float, default=0.4, help="Share of the GPU's bf16 peak that a step runs at.")
    plan.add_argument(
        "--bandwidth",
        type=float | None,
        metavar="GB/S",
        help="That a GPU sends; by default its own link within one machine, else a port of 400 Gbit/s, 50 GB/s.",
    )
    plan.add_argument(
        "--usable", type=float, default=0.92, help="Share of a GPU's memory for tensors; CUDA and NCCL take the rest."
    )
    plan.add_argument("--tokens", type=float | None, metavar="N", help="To train on; by default those of max_steps.")
    plan.add_argument("--price", type=float, default=2.0, help="Of an hour of one GPU, in any currency.")
    plan.add_argument("--alone", action="store_true", help="Plan the config as it is: no other ways are tried.")
    plan.add_argument("--json", action="store_true", help="Print it as JSON, in bytes and seconds.")
    plan.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("plan", plan, help=plan.description)

    birth = Parser(description="Re-create a birth from config and seed: its certificate and, if wanted, its weights.")
    birth.add_argument("config", type=str, metavar="CONFIG", help="YAML file of a run or of a model.")
    birth.add_argument("--seed", type=int | None, help="init_seed; by default the config's own.")
    birth.add_argument("--out", type=str | None, metavar="DIR", help="Folder for the weights and birth.json.")
    birth.add_argument("--json", action="store_true", help="Print the certificate as JSON.")
    birth.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("birth", birth, help=birth.description)

    sample = Parser(description="Let a run's model go on with a text.")
    sample.add_argument("run", type=str, metavar="RUN", help="Folder that `pretrain` wrote.")
    sample.add_argument("--prompt", type=str, default="", help="Text to go on with; none begins a new one.")
    sample.add_argument("--max_tokens", type=int, default=100, metavar="N", help="Tokens to write at most.")
    sample.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token.")
    sample.add_argument("--top_k", type=int | None, metavar="K", help="Draw from the K likeliest tokens only.")
    sample.add_argument("--seed", type=int, default=0, help="Decides the draws.")
    sample.add_argument("--step", type=int | None, metavar="N", help="Checkpoint after N steps; by default the last.")
    sample.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("sample", sample, help=sample.description)

    export = Parser(description="Write a run's checkpoint as transformers reads it (docs/exchange.md).")
    export.add_argument("run", type=str, metavar="RUN", help="Folder that `pretrain` wrote.")
    export.add_argument("out", type=str, metavar="DIR", help="New folder.")
    export.add_argument("--step", type=int | None, metavar="N", help="Checkpoint after N steps; by default the last.")
    export.add_argument(
        "--dtype",
        type=Literal["float32", "bfloat16", "float16"] | None,
        help="Of the weights; by default as trained, float32.",
    )
    export.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("export", export, help=export.description)

    ablate = Parser(description="Run a study: every arm from every seed, then one table and one figure.")
    ablate.add_argument(
        "study", type=str, metavar="STUDY", help="YAML file of a study, of arms or of lineage (docs/studies.md)."
    )
    ablate.add_argument("--scale", type=str | None, metavar="NAME", help="One of the file's scales: another base.")
    ablate.add_argument("--out", type=str | None, metavar="DIR", help="By default studies/NAME or studies/NAME-SCALE.")
    ablate.add_argument("--arms", type=str | None, metavar="A,B", help="These arms alone; by default all.")
    ablate.add_argument(
        "--set", type=str, nargs="+", default=[], metavar="FIELD=VALUE", help="Change the base of every arm."
    )
    ablate.add_argument("--jobs", type=int, default=1, metavar="N", help="Runs at a time; they share the cores.")
    ablate.add_argument("--summary", action="store_true", help="Run nothing: table and figure of what is there.")
    ablate.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("ablate", ablate, help=ablate.description)

    model = (
        "a run (its last checkpoint), RUN@STEP, a checkpoint, CONFIG.yaml@SEED (a birth), transformers folder or hub id"
    )
    fingerprint = Parser(description="Tell which models share a birth (docs/seedprint.md).")
    fingerprint.add_argument("models", type=str, nargs="*", metavar="MODEL", help=f"Each {model}.")
    fingerprint.add_argument(
        "--out", type=str | None, metavar="PNG", help="Picture; by default fingerprint.png, of three models or more."
    )
    fingerprint.add_argument(
        "--calibrate",
        type=str | None,
        metavar="CONFIG",
        help="Measure how often the nulls are wrong about births of this config.",
    )
    fingerprint.add_argument(
        "--pairs", type=int, default=200, metavar="N", help="Pairs of strangers that --calibrate makes."
    )
    fingerprint.add_argument(
        "--kin",
        type=str,
        nargs="+",
        default=[],
        metavar="RUN",
        help="Runs whose checkpoints are the kin of --calibrate; by default --kin_pairs births trained a little.",
    )
    fingerprint.add_argument("--kin_pairs", type=int, default=20, metavar="N", help="See --kin.")
    commands.add_subcommand("fingerprint", fingerprint, help=fingerprint.description)

    identify = Parser(description="Tell which seed a model was born from (docs/seedprint.md).")
    identify.add_argument("model", type=str, metavar="MODEL", help=model[0].upper() + model[1:] + ".")
    identify.add_argument(
        "--seeds", type=str, required=True, metavar="A..B", help="Candidates: 0..9999, or 3,7,10..20."
    )
    identify.add_argument(
        "--config", type=str | None, metavar="CONFIG", help="YAML file of the births; by default the run's own."
    )
    commands.add_subcommand("identify", identify, help=identify.description)
    for command, n_inputs in ((fingerprint, 2000), (identify, 500)):
        add_test_options(command, n_inputs)

    snapshot = Parser(description="Measure a model's biases, ours or of transformers (docs/measurements.md).")
    snapshot.add_argument("model", type=str, metavar="MODEL", help=model[0].upper() + model[1:] + ".")
    snapshot.add_argument(
        "--step",
        type=int | None,
        metavar="N",
        help="Of a run, the checkpoint after N steps; of a model of transformers, the steps to put in its snapshot.",
    )
    snapshot.add_argument("--n_sequences", type=int, default=256, metavar="N", help="Sequences in the random probe.")
    snapshot.add_argument(
        "--seq_len", type=int | None, metavar="T", help="Tokens in each; by default 64, or as many as the model reads."
    )
    snapshot.add_argument("--probe_seed", type=int, default=0, help="Decides the sequences, and nothing else.")
    snapshot.add_argument("--batch_size", type=int, default=64, metavar="B", help="Sequences in one forward pass.")
    snapshot.add_argument("--sink_epsilon", type=float, default=0.3, help="Importance from which on a key is a sink.")
    snapshot.add_argument(
        "--dtype",
        type=Literal["float32", "bfloat16", "float16", "float64"],
        default="float32",
        help="What the pass runs in.",
    )
    snapshot.add_argument("--out", type=str | None, metavar="DIR", help="New folder for all scalars and arrays.")
    snapshot.add_argument("--json", action="store_true", help="Print it as JSON.")
    snapshot.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("snapshot", snapshot, help=snapshot.description)

    intervene = Parser(description="Change one position in one block, and see whether a sink forms there later.")
    intervene.add_argument("model", type=str, metavar="MODEL", help=model[0].upper() + model[1:] + ".")
    intervene.add_argument(
        "--kind",
        type=Literal["mask", "amplify", "scale"],
        required=True,
        help="mask: its query sees itself only; amplify: its value aggregation moves from the mean; scale: it grows.",
    )
    intervene.add_argument("--layer", type=int, required=True, metavar="L", help="Block, from 1.")
    intervene.add_argument("--position", type=int, required=True, metavar="K", help="Position, from 0.")
    intervene.add_argument("--lambda", type=str, default="1,2,4,8", metavar="A,B", help="Doses; a mask has none.")
    intervene.add_argument("--n_sequences", type=int, default=64, metavar="N", help="Sequences in the random probe.")
    intervene.add_argument("--seq_len", type=int, default=64, metavar="T", help="Tokens in each.")
    intervene.add_argument("--probe_seed", type=int, default=0, help="Decides the sequences, and nothing else.")
    intervene.add_argument("--batch_size", type=int, default=64, metavar="B", help="Sequences in one forward pass.")
    intervene.add_argument("--out", type=str | None, metavar="PNG", help="Picture; by default intervene.png.")
    intervene.add_argument("--json", action="store_true", help="Print it as JSON.")
    intervene.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("intervene", intervene, help=intervene.description)
    return parser, {
        "pretrain": pretrain,
        "report": report,
        "describe": describe,
        "plan": plan,
        "birth": birth,
        "ablate": ablate,
        "fingerprint": fingerprint,
        "identify": identify,
        "snapshot": snapshot,
        "intervene": intervene,
        "sample": sample,
        "export": export,
    }


def normal_dashes(arguments: Sequence[str]) -> list[str]:
    """Options with their words joined by underscores, as fields are: ``--init-from X`` is ``--init_from X``."""
    return [
        "--" + a[2:].partition("=")[0].replace("-", "_") + "".join(a[2:].partition("=")[1:]) if a[:2] == "--" else a
        for a in arguments
    ]
