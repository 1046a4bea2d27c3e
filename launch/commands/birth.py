"""`birthmark birth`: the birth that a config and a seed give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config_parser import Parser
from ..options import add_config, add_json, check_seed, config_with_overrides

SUMMARY = "Re-create a birth from config and seed: its certificate and, if wanted, its weights."


def add_options(parser: Parser) -> None:
    """Add the options for the config, the seed and the output folder."""
    add_config(parser)
    parser.add_argument("--seed", type=int | None, help="init_seed; by default the config's own.")
    parser.add_argument("--out", type=str | None, metavar="DIR", help="Folder for the weights and birth.json.")
    add_json(parser)


def run(options: Namespace) -> int:
    """Draw the weights, and write them or print what they are."""
    from ...files import atomic_path, write_json
    from ...models.birth import certificate_of, write_birth
    from ...plan.describe import describe
    from ...report.terminal import bar, print_json

    name = options.config
    options.config, named = _config_and_seed(name)
    if None not in (named, options.seed):
        raise UsageError(f"--seed {options.seed}: the name gives seed {named}; leave one of them out")
    config = config_with_overrides(options)
    if config.init_from:
        raise UsageError(
            f"{name}: begins from {config.init_from}, and has no birth of its own; give CONFIG@SEED, or a run that was "
            "born"
        )
    seed = next((one for one in (options.seed, named) if one is not None), config.init_seed)
    check_seed("seed", seed)
    out = Path(options.out) if options.out else None
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists already; give a new folder")
    model = {"model": dataclasses.asdict(config.model)}
    with bar("birth", describe(config.model)["n_params"], quiet=options.json) as advance:

        def each(name: str, values: Any) -> None:
            advance(values.size)

        if out is None:
            certificate = certificate_of(config.model, seed, each) | model
        else:
            with atomic_path(out) as new:
                new.mkdir()
                certificate = write_birth(config.model, seed, new, each=each) | model
                write_json(new / "birth.json", certificate)
    if options.json:
        print_json(certificate)
    else:
        print(f"digest    {certificate['digest']}\ninit_seed {seed}\nn_params  {certificate['n_params']:,}", flush=True)
    return 0


def _config_and_seed(name: str) -> tuple[str, int | None]:
    """Return the config that a name means, and the seed if the name gives it: CONFIG@SEED or RUN@0."""
    from ...trainer.by_name.name_grammar import read_name

    found = read_name(name)
    if found.kind == "birth":
        return str(found.path), found.number
    if found.kind == "run" and not found.number and not found.average:
        return str(found.run.config), None
    if found.kind in ("hub", "folder") and not found.path.is_dir():
        return name, None  # a file without a suffix, or nothing, which is refused with the nearest name
    raise UsageError(f"{name}: is {found.in_words}; a birth is drawn from a config: give CONFIG@SEED, a run or RUN@0")
