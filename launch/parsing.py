"""Options of the commands that are not modules of their own yet."""

from __future__ import annotations

from collections.abc import Callable

from ..study.lineage.test_options import add_test_options
from ..trainer.config_parser import Parser

_MODEL = "a run (its last checkpoint), RUN@STEP, a checkpoint, CONFIG@SEED (a birth), transformers folder or hub id"


def _plan(parser: Parser) -> None:
    parser.add_argument("config", type=str, metavar="CONFIG", help="YAML file of a run.")
    parser.add_argument("--n_gpus", type=int, required=True, metavar="N", help="GPUs, each with one process.")
    parser.add_argument(
        "--gpu",
        type=str,
        default="h100-80gb",
        help="h100-80gb, h100-pcie-80gb, h200-141gb, b200-192gb, a100-40gb, a100-80gb, l40s-48gb, rtx4090-24gb; cpu: "
        "processes on this machine.",
    )
    parser.add_argument("--gpus_per_node", type=int, default=8, metavar="N", help="GPUs in one machine.")
    parser.add_argument(
        "--strategy", type=str | None, metavar="NAME", help="In place of the config's; see trainer.strategy."
    )
    parser.add_argument("--set", type=str, nargs="+", default=[], metavar="FIELD=VALUE", help="Change the config.")
    parser.add_argument("--mfu", type=float, default=0.4, help="Share of the GPU's bf16 peak that a step runs at.")
    parser.add_argument(
        "--bandwidth",
        type=float | None,
        metavar="GB/S",
        help="That a GPU sends; by default its own link within one machine, else a port of 400 Gbit/s, 50 GB/s.",
    )
    parser.add_argument(
        "--usable", type=float, default=0.92, help="Share of a GPU's memory for tensors; CUDA and NCCL take the rest."
    )
    parser.add_argument("--tokens", type=float | None, metavar="N", help="To train on; by default those of max_steps.")
    parser.add_argument("--price", type=float, default=2.0, help="Of an hour of one GPU, in any currency.")
    parser.add_argument("--alone", action="store_true", help="Plan the config as it is: no other ways are tried.")
    parser.add_argument("--json", action="store_true", help="Print it as JSON, in bytes and seconds.")


def _ablate(parser: Parser) -> None:
    parser.add_argument(
        "study", type=str, metavar="STUDY", help="YAML file of a study, of arms or of lineage (docs/studies.md)."
    )
    parser.add_argument("--scale", type=str | None, metavar="NAME", help="One of the file's scales: another base.")
    parser.add_argument("--out", type=str | None, metavar="DIR", help="By default studies/NAME or studies/NAME-SCALE.")
    parser.add_argument("--arms", type=str | None, metavar="A,B", help="These arms alone; by default all.")
    parser.add_argument(
        "--set", type=str, nargs="+", default=[], metavar="FIELD=VALUE", help="Change the base of every arm."
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Runs at a time; they share the cores.")
    parser.add_argument("--summary", action="store_true", help="Run nothing: table and figure of what is there.")


def _fingerprint(parser: Parser) -> None:
    parser.add_argument("models", type=str, nargs="*", metavar="MODEL", help=f"Each {_MODEL}.")
    parser.add_argument(
        "--out", type=str | None, metavar="PNG", help="Picture; by default fingerprint.png, of three models or more."
    )
    parser.add_argument(
        "--calibrate",
        type=str | None,
        metavar="CONFIG",
        help="Measure how often the nulls are wrong about births of this config.",
    )
    parser.add_argument(
        "--pairs", type=int, default=200, metavar="N", help="Pairs of strangers that --calibrate makes."
    )
    parser.add_argument(
        "--kin",
        type=str,
        nargs="+",
        default=[],
        metavar="RUN",
        help="Runs whose checkpoints are the kin of --calibrate; by default --kin_pairs births trained a little.",
    )
    parser.add_argument("--kin_pairs", type=int, default=20, metavar="N", help="See --kin.")
    add_test_options(parser, 2000)


def _identify(parser: Parser) -> None:
    parser.add_argument("model", type=str, metavar="MODEL", help=_MODEL[0].upper() + _MODEL[1:] + ".")
    parser.add_argument("--seeds", type=str, required=True, metavar="A..B", help="Candidates: 0..9999, or 3,7,10..20.")
    parser.add_argument(
        "--config", type=str | None, metavar="CONFIG", help="YAML file of the births; by default the run's own."
    )
    add_test_options(parser, 500)


SUMMARY = {
    "plan": "Tell whether a run fits on a cluster and what it takes there (docs/cluster.md).",
    "ablate": "Run a study: every arm from every seed, then one table and one figure.",
    "fingerprint": "Tell which models share a birth (docs/seedprint.md).",
    "identify": "Tell which seed a model was born from (docs/seedprint.md).",
}

ADD_OPTIONS: dict[str, Callable[[Parser], None]] = {
    "plan": _plan,
    "ablate": _ablate,
    "fingerprint": _fingerprint,
    "identify": _identify,
}
