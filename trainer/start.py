"""Where a run's first weights come from: a birth, or a checkpoint of ``transformers`` to go on from."""

from __future__ import annotations

from dataclasses import asdict, replace

from ..errors import UsageError
from ..models.birth import born
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.exchange import Pretrained, load_pretrained, read_pretrained
from .config import RunConfig


def _flat(config: ModelConfig) -> dict[str, object]:
    """Fields by dotted name."""
    found: dict[str, object] = {}

    def walk(prefix: str, values: dict[str, object]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            else:
                found[prefix + name] = value

    walk("", asdict(config))
    return found


def _adopt(asked: ModelConfig, source: Pretrained, named: str) -> ModelConfig:
    """The source's model, at the length that was asked for.

    Raises:
        UsageError: another field was set to something that the source is not.
    """
    default, ours, theirs = _flat(ModelConfig()), _flat(asked), _flat(source.config)
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


def resolve(config: RunConfig) -> RunConfig:
    """The run with the model, and for text the tokenizer, of what it starts from.

    Raises:
        UsageError: the config asks for another model, or text comes without the tokenizer of the source.
        RunError: a damaged file of the source.
    """
    if not config.init_from:
        return config
    source = read_pretrained(config.init_from)
    model = _adopt(config.model, source, config.init_from)
    data = config.data
    if data.path != "backcopy" and data.tokenizer == "bpe":
        if source.tokenizer_file is None:
            raise UsageError(
                f"data.tokenizer: --init_from {config.init_from} has no tokenizer.json, and its token ids mean nothing "
                "without; give the path of its tokenizer"
            )
        data = replace(data, tokenizer=str(source.tokenizer_file))
    return replace(config, model=model, data=data)


def newborn(config: RunConfig, init_seed: int) -> Decoder:
    """The model at step 0 of the run for its own seed; a birth of the same architecture for any other."""
    if config.init_from and init_seed == config.init_seed:
        return load_pretrained(replace(read_pretrained(config.init_from), config=config.model))
    return born(config.model, init_seed)
