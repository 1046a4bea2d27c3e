"""Checkpoints by name: a folder, or a repository of the Hugging Face hub, from its cache or fetched into it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...files import path_below, user_path
from ...messages import one_line
from .gguf_model import gguf_files, gguf_folder
from .weight_files import INDEX

#: Seconds that the hub has to answer, and how often it is asked. It asks six times by itself, for minutes.
_ANSWER_S, _ATTEMPTS = 10.0, 2

#: Files that are fetched of a repository.
_WANTED = ("config.json", "model*.safetensors", INDEX, "tokenizer.json", "tokenizer_config.json")


def _parent(name: str) -> Path | None:
    """Return the folder that contains a relative name of two parts or more."""
    parent = Path(name).parent
    return None if parent == Path() else parent


def is_path(name: str) -> bool:
    """Return True if a name can only be a path: it looks like one, or its parent folder exists."""
    parent = _parent(name)
    looks = name.startswith((".", "~", "/")) or name.endswith("/") or name.count("/") > 1
    return looks or (parent is not None and parent.is_dir())


def pretrained_folder(source: str | Path, *, with_code: bool = False) -> Path:
    """Return the folder of ``config.json`` that a name means.

    Args:
        source: the folder itself; a GGUF file or a folder that holds one, for which a folder is made; or a hub id,
            ``NAME`` or ``ORG/NAME``, optionally with ``@REVISION``, which gives the snapshot in the hub's cache.
        with_code: fetch the Python files of a repository too.

    Raises:
        UsageError: none of these; for a possible hub id the message quotes the hub.
        RunError: a damaged GGUF file.
    """
    folder = user_path(source)
    if files := gguf_files(folder):
        return gguf_folder(files)
    if folder.is_dir():
        return folder
    if not isinstance(source, str) or is_path(source):
        parent = _parent(str(source))
        there = f"; {parent} is a folder here, so it is not looked up on the hub" if parent and parent.is_dir() else ""
        raise UsageError(
            f"{source}: no such folder{there}; give one that transformers' save_pretrained wrote, or a hub id"
        )
    return _hub_snapshot(source, (*_WANTED, "*.py") if with_code else _WANTED)


def _hub_snapshot(source: str, wanted: tuple[str, ...]) -> Path:
    """Download the snapshot of a hub id into the hub's cache; offline, use one that is there already."""
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")
    where: dict[str, Any] = {"repo_id": name, "revision": revision or None, "allow_patterns": list(wanted)}
    refused = _why_not(name, revision or None)
    try:
        return Path(snapshot_download(**where, local_files_only=bool(refused)))
    except Exception as error:  # the hub's library and its transport raise a dozen kinds, of several sentences each
        raise UsageError(
            f"{source}: no such folder, and not from the hub either ({refused or _first_sentence(error)}); "
            "check name and network"
        ) from None


@contextmanager
def downloaded(source: str) -> Iterator[Path]:
    """Download a hub id, ``ORG/NAME`` optionally with ``@REVISION``, into a temporary folder for the context.

    Weights are safetensors if it has any, else the pickled ones, which this package never opens.

    Raises:
        UsageError: the hub refuses; the message quotes it.
    """
    from huggingface_hub import HfApi, snapshot_download

    name, _, revision = source.partition("@")
    if refused := _why_not(name, revision or None):
        raise UsageError(f"{source}: not from the hub ({refused}); check name and network")
    with tempfile.TemporaryDirectory(prefix="birthmark-hub-") as folder:
        try:
            files = HfApi().list_repo_files(name, revision=revision or None)
            safe = any(file.endswith(".safetensors") for file in files)
            wanted = _WANTED if safe else (*_WANTED, "pytorch_model*.bin", "pytorch_model.bin.index.json")
            snapshot_download(name, revision=revision or None, local_dir=folder, allow_patterns=list(wanted))
        except Exception as error:  # of the hub's library and of its transport
            raise UsageError(f"{source}: not from the hub ({_first_sentence(error)}); check name and network") from None
        yield Path(folder)


def _why_not(name: str, revision: str | None) -> str:
    """Return the hub's reason to refuse a model; empty if it does not."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    found = ""
    for _ in range(_ATTEMPTS):
        try:
            info = HfApi().model_info(name, revision=revision, timeout=_ANSWER_S)
            for file in info.siblings or ():
                path_below(Path(), file.rfilename, _StrangeName, nested=True)
            return ""
        except _StrangeName as error:
            return f"it names a file {error}"
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
            return _first_sentence(error)
        except Exception as error:  # of the transport, which is one library in some versions and another in others
            found = f"the hub does not answer: {_first_sentence(error)}"
    return found


class _StrangeName(Exception):  # noqa: N818 - says what it is
    """Error for a repository that names a file outside of its folder."""


#: Messages for answers that the hub's library reports by number only.
_SAID = {
    "RevisionNotFoundError": "no such revision",
    "RepositoryNotFoundError": "no such repository, or a private one",
    "GatedRepoError": "its owner must grant you access",
    "EntryNotFoundError": "a file of it is gone",
    "RemoteEntryNotFoundError": "a file of it is gone",
}


def _first_sentence(error: Exception) -> str:
    if (said := _SAID.get(type(error).__name__)) is not None:
        return said
    return one_line(error).split(". ")[0] or type(error).__name__
