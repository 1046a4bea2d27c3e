"""Where a run's first weights come from: a birth, or a checkpoint to go on from, a run's or one of ``transformers``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from ..errors import UsageError
from ..models.birth import Sharder, born
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.dotted import dotted
from ..models.exchange.pretrained import Pretrained, is_path, load_pretrained, read_pretrained
from .config import RunConfig
from .origin import Origin, load_origin, open_origin


def _source(named: str) -> Origin | Pretrained:
    """What ``init_from`` names.

    Raises:
        UsageError, RunError: nothing there, or nothing that can be gone on from.
    """
    origin = open_origin(named)
    if origin is not None:
        return origin
    try:
        return read_pretrained(named)
    except UsageError as error:
        if Path(named).expanduser().exists() or is_path(named):
            raise UsageError(
                f"--init_from {named}: neither a run, RUN@STEP, a checkpoint nor a folder of transformers "
                f"({str(error).removeprefix(f'{named}: ')})"
            ) from None
        raise


def _adopt(asked: ModelConfig, source: Origin | Pretrained, named: str) -> ModelConfig:
    """The source's model, at the length that was asked for.

    Raises:
        UsageError: another field was set to something that the source is not.
    """
    default, ours, theirs = (dotted(asdict(config)) for config in (ModelConfig(), asked, source.config))
    resizable = {"max_seq_len"} if source.config.positions != "learned" else set()
    # How a birth would be drawn says nothing here: there is none.
    free = {name for name in ours if name.startswith("init.")} | resizable
    clash = [name for name in ours if ours[name] not in (default[name], theirs[name]) and name not in free]
    if clash:
        raise UsageError(
            f"model.{clash[0]} is {ours[clash[0]]}, but --init_from {named} has {theirs[clash[0]]}: leave it out"
        )
    length = asked.max_seq_len if resizable and asked.max_seq_len != ModelConfig.max_seq_len else None
    return replace(source.config, max_seq_len=length or source.config.max_seq_len)


def adopted(config: RunConfig) -> RunConfig:
    """The run with the model, and for text the tokenizer, of what it starts from; of a run, the very checkpoint.

    Raises:
        UsageError: the config asks for another model, or text comes without the tokenizer of the source.
        RunError: a damaged file of the source.
    """
    if not config.init_from:
        return config
    source = _source(config.init_from)
    model = _adopt(config.model, source, config.init_from)
    data = config.data
    if data.path != "backcopy" and data.tokenizer == "bpe":
        if source.tokenizer_file is None:
            raise UsageError(
                f"data.tokenizer: --init_from {config.init_from} has no tokenizer.json, and its token ids mean nothing "
                "without; give the path of its tokenizer"
            )
        data = replace(data, tokenizer=str(source.tokenizer_file))
    # A run may go on after this; its checkpoint stays what it is.
    named = source.name if isinstance(source, Origin) else config.init_from
    return replace(config, init_from=named, model=model, data=data)


def newborn(
    config: RunConfig, init_seed: int, device: torch.device | str = "cpu", shard: Sharder | None = None
) -> Decoder:
    """The model at step 0 of the run for its own seed; a birth of the same architecture for any other.

    Args:
        config: the run.
        init_seed: its own, or another.
        device: where this process holds it.
        shard: cuts it over processes.
    """
    if config.init_from and init_seed == config.init_seed:
        source = _source(config.init_from)
        if isinstance(source, Origin):
            return load_origin(replace(source, config=config.model), device, shard)
        return load_pretrained(replace(source, config=config.model), device=device, shard=shard)
    return born(config.model, init_seed, device, shard)
