"""`birthmark tokenise`: the token shards that runs of a config read, made before the first of them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config_parser import Parser
from ..options import add_config, add_json, config_with_overrides

SUMMARY = "Tokenise the text of a run once, before it starts (docs/tokens.md)."


def add_options(parser: Parser) -> None:
    """Add the options for the config and the resources to use."""
    add_config(parser)
    parser.add_argument("--workers", type=int | None, metavar="N", help="Processes, in place of data.n_workers.")
    parser.add_argument(
        "--out", type=str | None, metavar="DIR", help="Folder of the shards, in place of data.cache_dir."
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Tokenise the data, and say what is there now."""
    config = config_with_overrides(options)
    if config.init_from:
        from ...trainer.initial_model import resolve_init_from  # with torch and Lightning, half a gigabyte

        config = resolve_init_from(config)
    if config.data.stream:
        raise UsageError("data.stream is true: the run tokenises as it reads; there is nothing to prepare")
    given = {"n_workers": options.workers, "cache_dir": options.out, "stage_to": ""}
    data = dataclasses.replace(config.data, **{name: value for name, value in given.items() if value is not None})
    if problems := data.problems():
        raise UsageError("\n".join(problems))
    if data.path == "backcopy":
        raise UsageError("data.path: backcopy has no text to tokenise; its samples are computed")

    from ...data.tokenised import tokenise
    from ...report.terminal import print_json

    start = time.perf_counter()
    done = tokenise(data, config.model.vocab_size)
    seconds = time.perf_counter() - start
    sources = {name: _facts(shards.folder, shards.meta) for name, shards in done.shards.items()}
    if options.json:
        print_json(
            {
                "tokenizer": str(done.tokenizer_path),
                "vocab_size": done.n_tokens,
                "sources": sources,
                "seconds": seconds,
            }
        )
        return 0
    for name, facts in sources.items():
        counts = ", ".join(f"{facts[what]:,} {what}" for what in ("documents", "tokens", "bytes"))
        print(f"{name or data.path}: {counts}, in {facts['folder']}")
    new = sum(sources[name]["bytes"] for name, shards in done.shards.items() if shards.is_new)
    if new:
        print(f"{new / 1e6:,.1f} MB in {seconds:,.1f} s: {new / 1e6 / seconds:,.2f} MB/s, survey included", flush=True)
    else:
        print("found as they are: nothing was to do", flush=True)
    return 0


def _facts(folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    totals = {what: sum(split[what] for split in meta["splits"].values()) for what in ("documents", "tokens", "bytes")}
    return {"folder": str(folder), **totals, "splits": meta["splits"], "skipped": meta["skipped"]}
