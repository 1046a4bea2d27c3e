"""`birthmark export`: the weights of a run or of a birth in the form that transformers reads."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from ...errors import RunError, UsageError
from ...measure.records import RunDir
from ...messages import for_terminal, one_line, reason_of
from ...trainer.config_parser import Parser
from ...urls import hide_credentials
from ..options import tell

if TYPE_CHECKING:
    import torch

    from ...trainer.by_name.model_names import SourceWithBirth

SUMMARY = "Write a checkpoint, a birth or a GGUF model as transformers reads it (docs/exchange.md)."


def add_options(parser: Parser) -> None:
    """Add the options that name the checkpoint and the output folder."""
    parser.add_argument(
        "model",
        type=str,
        metavar="MODEL",
        help="A run (its last checkpoint), RUN@STEP (@0 is its birth), a checkpoint, each with @ema or @meanK for "
        "averaged weights, CONFIG@SEED (a birth) or a GGUF file.",
    )
    parser.add_argument("--step", type=int | None, metavar="N", help="Take a run's checkpoint after N steps.")
    parser.add_argument("out", type=str, metavar="DIR", help="New folder.")
    parser.add_argument(
        "--dtype",
        type=Literal["float32", "bfloat16", "float16"] | None,
        help="Type of the weights; by default as trained, float32.",
    )
    parser.add_argument(
        "--own_code",
        action="store_true",
        help="Write modelling code of Birthmark even if transformers has the architecture.",
    )
    parser.add_argument(
        "--gguf",
        action="store_true",
        help="Write one file as llama.cpp reads it, of a model of a family that it has.",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="Write the whole model of a run that trained a LoRA, with the LoRA in its weights. Else the adapter alone "
        "is written, as peft reads it (docs/exchange.md).",
    )
    parser.add_argument(
        "--push",
        type=str | None,
        metavar="ORG/NAME",
        help="Upload the folder with its card to this repository of the Hugging Face hub, private if it is new; log in "
        "with `hf auth login` before, or set HF_TOKEN.",
    )


def run(options: Namespace) -> int:
    """Write the folder, and print what its users must know; then upload it, if asked to.

    Raises:
        UsageError: no such model, or one with a part of the user's own; ``out`` exists; no access to the hub.
        RunError: the upload failed; the folder is complete.
    """
    if options.push is not None:
        check_push(options.push)  # before minutes of work
    status = _export(options)
    if options.push is not None:
        push(Path(options.out), options.push)
    return status


def _export(options: Namespace) -> int:
    import torch

    from ...data.tokenizer import TextTokenizer
    from ...files import atomic_path
    from ...models.adapter_config import AdapterConfig
    from ...models.adapters import merged
    from ...models.exchange.gguf_file import GGUF_FILE, check_gguf, write_gguf
    from ...models.exchange.peft_folder import write_peft
    from ...models.exchange.pretrained import write_pretrained
    from ...models.exchange.written_layout import MODEL_TYPE, layout_of
    from ...models.parameter_shapes import tensor_shapes
    from ...trainer.by_name.model_names import open_source_with_birth
    from ...trainer.by_name.name_grammar import at_step
    from ...trainer.checkpoints.folder_io import CheckpointWeights

    name, out = at_step(options.model, options.step), Path(options.out)
    source = open_source_with_birth(name)
    if out.exists():
        raise UsageError(f"{out}: exists already; give a new folder")
    if source is None:
        return _export_gguf(options, out)
    adapter = source.births.adapter if source.init_seed == source.births.init_seed else AdapterConfig()
    if options.merge and not adapter.is_on:
        raise UsageError(f"--merge: {name} has no adapter; leave it out")
    if adapter.is_on and not options.merge:
        if options.dtype is not None or options.own_code or options.gguf:
            given = "--gguf" if options.gguf else "--own_code" if options.own_code else f"--dtype {options.dtype}"
            raise UsageError(
                f"{given}: {name} leaves as an adapter in float32, as peft reads it; leave it out, or --merge"
            )
        with atomic_path(out) as new:
            write_peft(source.load(), new, source.births.init_from)
        print(options.out)
        return 0
    if options.gguf and options.own_code:
        raise UsageError("--gguf with --own_code: a GGUF file has no code; leave one of them out")
    if options.gguf:
        check_gguf(source.config)
    end = None if source.tokenizer is None else TextTokenizer.load(source.tokenizer).end_of_text
    # A checkpoint's weights are read one by one.
    folder = source.checkpoint
    weights: Mapping[str, torch.Tensor]
    layout = layout_of(source.config, options.own_code)
    notes: list[str] = []
    if adapter.is_on:
        weights = merged(source.load())
    elif folder is None:
        weights = source.load().state_dict()
    else:
        stored = source.weights()
        assert isinstance(stored, CheckpointWeights)
        weights = stored
        stored.check(tensor_shapes(source.config))
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    tokenizer = None if source.tokenizer is None else Path(source.tokenizer)
    with atomic_path(out) as new:
        if options.gguf:
            new.mkdir()
            notes += write_gguf(
                source.config, weights, new / GGUF_FILE, tokenizer_file=tokenizer, eos_token_id=end, dtype=dtype
            )
        else:
            notes += write_pretrained(
                source.config, weights, new, tokenizer_file=tokenizer, eos_token_id=end, dtype=dtype, layout=layout
            )
        card = _card(out.name, source, list(layout.files), weights, GGUF_FILE if options.gguf else None)
        (new / "README.md").write_text(card, encoding="utf-8")
    if layout.model_type == MODEL_TYPE:
        notes.append(f"with its own code ({', '.join(layout.files)}): load it with trust_remote_code=True")
    elif not options.gguf and not is_installed(layout.model_type):
        notes.append(
            f"transformers {importlib.metadata.version('transformers')}, installed here, has no {layout.model_type}: "
            "a later one opens it, or export with --own_code"
        )
    print(for_terminal("\n".join([options.out, *notes])))
    return 0


def _export_gguf(options: Namespace, out: Path) -> int:
    """Write a GGUF model as a folder of transformers.

    Raises:
        UsageError: no such model, or an option that it leaves no room for.
    """
    import torch

    from ...files import atomic_path, read_json
    from ...models.exchange.gguf_model import gguf_files, kinds_of, write_dequantised
    from ...models.exchange.hub import pretrained_folder
    from ...report.model_card import dequantised_card
    from ...trainer.by_name.name_grammar import read_name

    name = options.model
    found = read_name(name)
    if found.kind == "folder" and (found.path / "config.json").is_file():
        raise UsageError(f"{name}: is {found.in_words}, the form that an export writes; there is nothing to convert")
    if found.kind != "gguf":
        beside = "; a model of the hub has the form that an export writes already" if found.kind == "hub" else ""
        raise UsageError(f"{name}: neither a run, RUN@STEP, a checkpoint nor CONFIG@SEED, nor a GGUF file{beside}")
    for option in ("own_code", "gguf", "merge"):
        if options[option]:
            raise UsageError(f"--{option}: {name} is a GGUF model, and leaves as transformers has it; leave it out")
    folder = pretrained_folder(name)
    if not (kinds := kinds_of(folder)):
        raise UsageError(f"{name}: is a folder of transformers already; name a GGUF file in it")
    dtype = options.dtype or "float32"
    with atomic_path(out) as new:
        new.mkdir()
        write_dequantised(folder, new, getattr(torch, dtype))
        file, config = gguf_files(Path(name))[0].name, read_json(new / "config.json")
        has_tokenizer = (new / "tokenizer.json").is_file()
        card = dequantised_card(out.name, file, config["model_type"], kinds, dtype, has_tokenizer)
        (new / "README.md").write_text(card, encoding="utf-8")
    print(options.out)
    return 0


def check_push(repository: str) -> None:
    """Check that the hub may be asked for a repository of this name.

    Raises:
        UsageError: no such name, no login, or ``huggingface_hub`` is missing.
        RunError: the hub does not answer.
    """
    try:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise UsageError("--push needs huggingface_hub: pip install huggingface_hub") from None
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--push {one_line(repository)}: {reason_of(error)}; give ORG/NAME") from None
    if repository.count("/") != 1:
        raise UsageError(f"--push {repository}: names no owner; give ORG/NAME")
    if get_token() is None:
        raise UsageError(f"--push {repository}: you are not logged in; hf auth login, or set HF_TOKEN")
    with _asking_hub(repository, "nothing was written"):
        HfApi().whoami()


def push(folder: Path, repository: str) -> None:
    """Upload a folder to a repository of the hub, as one commit, and print its address.

    Raises:
        UsageError, RunError: see `check_push`.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    with _asking_hub(repository, f"{folder} is complete, hf upload {repository} {folder} goes on"):
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export by birthmark")
    print(f"{hide_credentials(hub.endpoint)}/{repository}")


@contextlib.contextmanager
def _asking_hub(repository: str, left: str) -> Iterator[None]:
    """Turn a failure of the hub into one line that has no token in it."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UsageError(
                f"--push {repository}: the hub refuses your token ({status}); {left}; give one that may write there"
            ) from None
        raise RunError(f"--push {repository}: the hub answers {status}; {left}") from None
    except (httpx.HTTPError, OSError) as error:
        raise RunError(f"--push {repository}: the hub does not answer ({type(error).__name__}); {left}") from None


def is_installed(model_type: str) -> bool:
    """Say if the installed transformers has a family, or if no transformers is installed: the library is not loaded for
    that.
    """
    library = importlib.util.find_spec("transformers")
    return library is None or (Path(str(library.origin)).parent / "models" / model_type).is_dir()


def _card(
    name: str,
    source: SourceWithBirth,
    code: list[str],
    weights: Mapping[str, torch.Tensor],
    gguf_file: str | None,
) -> str:
    """Write the model card; a line on standard error says where a record of the run cannot be read."""
    from ...audit.certificate import read_statement
    from ...files import content_digest
    from ...models.birth import digest_of
    from ...models.exchange.gguf_file import is_read_by_transformers
    from ...models.parameter_shapes import parameter_shapes
    from ...report.model_card import RunFacts, facts_of_run, model_card

    facts, certificate, digest = RunFacts(), None, None
    if source.run is None:
        digest = digest_of((name, weights[name]) for name in sorted(dict(parameter_shapes(source.config))))
    else:
        run = RunDir(source.run)
        try:
            facts = facts_of_run(run, source.step)
            if source.averaged:  # figures in the run's records are of the trained weights
                facts = RunFacts(facts.birth)
            if (file := run.certificate).exists():
                statement = read_statement(file)
                certificate = {**statement, "sha256": content_digest(statement)}
        except RunError as error:  # the weights are what was asked for, and they are whole
            facts = RunFacts()
            tell(f"README.md says nothing of the run: {error}")
    return model_card(
        name,
        source.config,
        source.step,
        facts,
        code=code,
        gguf_file=gguf_file,
        hf_reads_gguf=gguf_file is None or is_read_by_transformers(source.config),
        has_tokenizer=source.tokenizer is not None,
        digest=digest,
        certificate=certificate,
        averaged=source.averaged,
    )
