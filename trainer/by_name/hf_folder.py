"""Models of ``transformers`` of any architecture: found, checked, and loaded by the library itself.

Nothing is unpickled. Code that a model brings runs only on request, and is named before.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from annotated_types import Interval
from typing_extensions import TypedDict

from ...errors import RunError, UsageError
from ...files import check_file, one_line, path_below, read_json
from ...measure.hf import HFConfig, HFModel, transformers_library
from ...models.exchange.gguf_header import kinds_in_words
from ...models.exchange.gguf_model import gguf_tensors, kinds_of, open_weights
from ...models.exchange.hub import pretrained_folder
from ...models.exchange.pretrained import weight_files
from ...models.exchange.weight_files import FLOATS

#: Floating dtypes of safetensors, as ``config.json`` calls them.
_FLOATS = {code: name for name, code in FLOATS.items()}


_Layers = Annotated[int, Interval(ge=1, le=2048)]
_Width = Annotated[int, Interval(ge=1, le=1 << 24)]


class HFFolderConfig(TypedDict):
    """``config.json`` of any model of ``transformers``: the fields whose numbers allocate memory before a tensor is
    read.
    """

    model_type: str
    num_hidden_layers: NotRequired[_Layers]
    n_layer: NotRequired[_Layers]
    n_layers: NotRequired[_Layers]
    num_layers: NotRequired[_Layers]
    hidden_size: NotRequired[Annotated[int, Interval(ge=1, le=1 << 20)]]
    intermediate_size: NotRequired[_Width | list[_Width] | None]
    vocab_size: NotRequired[Annotated[int, Interval(ge=2, le=1 << 26)]]
    max_position_embeddings: NotRequired[Annotated[int, Interval(ge=1, le=1 << 27)]]
    auto_map: NotRequired[dict[str, Any]]
    quantization_config: NotRequired[dict[str, Any] | None]
    dtype: NotRequired[str | None]
    torch_dtype: NotRequired[str | None]


@dataclass(frozen=True)
class HFFolder:
    """A folder of a model of ``transformers``, checked; no tensor has been read, and no code of it has run."""

    name: str
    """Name, as the user gave it."""
    folder: Path
    runs_code: bool
    """True if its own code is run, as requested."""
    note: str | None
    """Line about its weights for the reader."""

    @property
    def tokenizer(self) -> Path | None:
        """``tokenizers`` JSON of the text that it reads, if it has one."""
        file = self.folder / "tokenizer.json"
        return file if file.is_file() else None

    def shape(self) -> HFConfig:
        """Return its shape; no weights are allocated."""
        with torch.device("meta"):
            return HFModel(self._newborn()).config

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by name; no weights are allocated."""
        with torch.device("meta"):
            return {name: tuple(parameter.shape) for name, parameter in self._newborn().named_parameters()}

    def birth(self, seed: int) -> HFModel:
        """Initialise a model of its config through ``transformers``, from a seed of torch's generator. The generator is
        restored.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return HFModel(self._newborn())

    def load(self, dtype: torch.dtype = torch.float32) -> HFModel:
        """Load the model.

        Raises:
            UsageError: the library cannot load it, or it cannot be measured.
            RunError: a tensor that is missing.
        """
        with self._library() as library:
            if (sources := gguf_tensors(self.folder)) is not None:
                model, info = self._from_gguf(library, dtype, sources)
            else:
                loaded: Any = self._loader(library, self._config(library)).from_pretrained(
                    self.folder,
                    dtype=dtype,
                    use_safetensors=True,
                    trust_remote_code=self.runs_code,
                    output_loading_info=True,
                )
                model, info = loaded
        if missing := sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"]):
            raise RunError(f"{self.name}: {missing[0]} is missing or of another shape: its values would be random")
        return HFModel(model)

    def _from_gguf(self, library: Any, dtype: torch.dtype, sources: Path) -> Any:
        """Return the model and the library's loading report; tensors are dequantised one at a time."""
        config = library.AutoConfig.from_pretrained(self.folder)
        kind = getattr(library, config.architectures[0])
        with open_weights(sources) as tensors:
            state = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118, as of safetensors
            return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)

    def _newborn(self) -> Any:
        with self._library() as library:
            config = self._config(library)
            return self._loader(library, config).from_config(
                config, dtype=torch.float32, trust_remote_code=self.runs_code
            )

    def _config(self, library: Any) -> Any:
        return library.AutoConfig.from_pretrained(self.folder, trust_remote_code=self.runs_code)

    def _loader(self, library: Any, config: Any) -> Any:
        """Return the library's class that loads it: most models of images and text are in a table of their own."""
        from transformers.models.auto import modeling_auto as tables

        kind = config.model_type
        if kind in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or self.runs_code:
            return library.AutoModelForCausalLM
        has_images = kind in tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        return library.AutoModelForImageTextToText if has_images else library.AutoModelForCausalLM

    @contextlib.contextmanager
    def _library(self) -> Iterator[Any]:
        library = transformers_for(self.name)
        try:
            yield library
        except Exception as error:  # the library and the hub's transport raise a dozen kinds, of several sentences each
            # It quotes the names of errors of its own.
            reason = re.sub(r"\w+(Error|Exception): ", "", one_line(error)).split(". ")[0]
            raise UsageError(f"{self.name}: transformers cannot load it ({reason})") from None


def transformers_for(name: str) -> Any:
    """Import ``transformers`` and silence it.

    Raises:
        UsageError: the library is not installed, or too old.
    """
    if not torch.cuda.is_available():
        # If DeepSpeed is installed, transformers imports it, and it would print that it sees no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers = transformers_library(name)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def find_hf_folder(
    name: str, *, trust_remote_code: bool = False, tell: Callable[[str], object] = lambda line: None
) -> HFFolder:
    """Find a model of ``transformers`` and check its files.

    Args:
        name: a folder, a GGUF file or a hub id.
        trust_remote_code: run the code that it brings, if it brings any.
        tell: called with a line that names the files that will run, before they do.

    Raises:
        UsageError: there is no such model, or it needs code of its own and that may not run.
        RunError: a damaged file.
    """
    folder = pretrained_folder(name, with_code=trust_remote_code)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{name}: no config.json in it")
    # Pipes and devices, at which the library would wait, and numbers at which it would allocate the world.
    for file in folder.iterdir():
        if not file.is_dir():
            check_file(file)
    config = read_json(folder / "config.json", HFFolderConfig)
    code = _code_files(name, config)
    if code and not trust_remote_code and not _is_known(name, config["model_type"]):
        raise UsageError(
            f"{name}: {config['model_type']} models bring code of their own ({', '.join(code)}), which is run only "
            "with --trust_remote_code; read it first"
        )
    runs_code = bool(code) and trust_remote_code
    if runs_code:
        tell(f"running code of {name}: {', '.join(_with_imports(folder, code))}")
    return HFFolder(name, folder, runs_code, _check_weights(name, folder, config))


def _is_known(name: str, model_type: str) -> bool:
    transformers_for(name)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _code_files(name: str, config: HFFolderConfig) -> list[str]:
    """List the files that ``auto_map`` names for the config and the model, in their order.

    Raises:
        UsageError: a file of another repository, which would be fetched and run unseen.
    """
    found: list[str] = []
    for kind, reference in (config.get("auto_map") or {}).items():
        if kind in ("AutoConfig", "AutoModelForCausalLM") and isinstance(reference, str):
            where, _, dotted = reference.rpartition("--")
            if where:
                raise UsageError(
                    f"{name}: auto_map.{kind} of its config.json is {one_line(reference)}: code of another repository; "
                    "fetch the model with its code into a folder, and name that"
                )
            file = f"{dotted.rpartition('.')[0]}.py"
            path_below(Path(), file, partial(_strange_code, name, kind), nested=True)
            found.append(file)
    return list(dict.fromkeys(found))


def _strange_code(name: str, kind: str, why: str) -> UsageError:
    return UsageError(f"{name}: auto_map.{kind} of its config.json names {why}")


def _with_imports(folder: Path, files: list[str]) -> list[str]:
    """Add the files beside them that these files import."""
    from transformers.dynamic_module_utils import get_relative_import_files

    imported = [Path(more).name for file in files for more in get_relative_import_files(folder / file)]
    return list(dict.fromkeys([*files, *imported]))


def _check_weights(name: str, folder: Path, config: HFFolderConfig) -> str | None:
    """Describe the weights' dtypes in a line; RunError for dtypes that cannot be right."""
    if kinds := kinds_of(folder):
        return f"{name}: its weights are stored as {kinds_in_words(kinds)}, and are read as float32"
    stored: dict[str, int] = {}
    quantised = bool(config.get("quantization_config"))
    for file in weight_files(folder):
        with open_weights(file) as tensors:
            for tensor in tensors.keys():  # noqa: SIM118, the library's object is no mapping
                kind = tensors.get_slice(tensor).get_dtype()
                stored[kind] = stored.get(kind, 0) + 1
                if kind not in _FLOATS and not quantised and tensor.endswith("weight"):
                    raise RunError(
                        f"{file}: {tensor} is {kind}, and config.json says nothing of quantisation: "
                        f"give weights of {', '.join(_FLOATS)}"
                    )
    declared = config.get("dtype") or config.get("torch_dtype")
    found = [_FLOATS[kind] for kind in stored if kind in _FLOATS]
    if declared is None or not found or declared in found or quantised:
        return None
    return f"{name}: its weights are {' and '.join(found)}, though config.json says {declared}"
