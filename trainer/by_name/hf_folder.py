"""Models of ``transformers`` of any architecture: found, checked, and loaded by the library itself.

Nothing is unpickled. Code that a model brings runs only on request, and is named before.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

import torch
from annotated_types import Interval
from torch.nn.modules.module import register_module_parameter_registration_hook
from typing_extensions import TypedDict

from ...errors import RunError, UsageError
from ...files import check_file, path_below, read_json
from ...measure.hf import HFConfig, HFModel, transformers_library
from ...messages import one_line
from ...models.exchange.gguf_header import kinds_in_words
from ...models.exchange.gguf_model import gguf_tensors, kinds_of, open_weights
from ...models.exchange.hub import pretrained_folder
from ...models.exchange.pretrained import weight_files
from ...models.exchange.weight_files import FLOATS

#: Floating dtypes of safetensors, as ``config.json`` calls them.
_FLOATS = {code: name for name, code in FLOATS.items()}


_MOST_LAYERS, _MOST_LABELS = 1 << 11, 1 << 20
#: Fields at any depth for which configs and models of families loop → the largest number.
_LOOPED = (
    (re.compile(r"(^|_)(layers?|blocks?|depths?)$"), _MOST_LAYERS),
    (re.compile(r"^num_labels$"), _MOST_LABELS),
)
_Layers = Annotated[int, Interval(ge=1, le=_MOST_LAYERS)]
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


class StoredWeights(NamedTuple):
    """Facts about a folder's weights, from the headers of its files."""

    n_tensors: int
    n_numbers: int
    """Numbers in them, at most: packed types count bits."""
    note: str | None
    """Line about them for the reader."""


@dataclass(frozen=True)
class HFFolder:
    """A folder of a model of ``transformers``, checked; no tensor has been read, and no code of it has run."""

    name: str
    """Name, as the user gave it."""
    folder: Path
    runs_code: bool
    """True if its own code is run, as requested."""
    weights: StoredWeights

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
            with self._bounded():
                yield library
        except _TooLargeError:
            raise
        except Exception as error:  # the library and the hub's transport raise a dozen kinds, of several sentences each
            # It quotes the names of errors of its own.
            reason = re.sub(r"\w+(Error|Exception): ", "", one_line(error)).split(". ")[0]
            raise UsageError(f"{self.name}: transformers cannot load it ({reason})") from None

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """Refuse a model that grows far beyond its weights while it is built: a few digits of a config ask for any
        size.
        """
        # A head that is tied to the embedding is stored once; some libraries store all experts as one tensor.
        most_numbers, most_tensors = 2 * self.weights.n_numbers + (1 << 16), 256 * self.weights.n_tensors + 1024
        held = set[tuple[int, str]]()
        n_numbers = 0

        def check(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
            nonlocal n_numbers
            if parameter is None or (id(module), name) in held:  # loading registers it again
                return
            held.add((id(module), name))
            n_numbers += parameter.numel()
            if n_numbers > most_numbers or len(held) > most_tensors:
                raise _TooLargeError(
                    f"{self.name}: config.json asks for a model of {n_numbers:,} or more parameters in {len(held):,} "
                    f"or more tensors, and its weights hold {self.weights.n_numbers:,} in {self.weights.n_tensors:,}; "
                    "give the config of these weights"
                )

        handle = register_module_parameter_registration_hook(check)
        try:
            yield
        finally:
            handle.remove()


class _TooLargeError(UsageError):
    """Error for a config that asks for far more than its weights hold."""


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
    _check_loops(folder / "config.json", config)
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


def _check_loops(file: Path, config: Any, field: str = "") -> None:
    """Raise RunError for a number of a config, or of one within it, for which its family would loop without an end."""
    for key, value in config.items() if isinstance(config, dict) else ():
        name = f"{field}.{key}" if field else key
        most = next((most for pattern, most in _LOOPED if pattern.search(key)), None)
        for one in value if isinstance(value, list) else [value]:
            if most is not None and isinstance(one, int) and one > most:
                raise RunError(f"{file}: damaged ({one_line(name, 60)} is {one_line(one, 40)}, above {most})")
            _check_loops(file, one, name)


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


def _check_weights(name: str, folder: Path, config: HFFolderConfig) -> StoredWeights:
    """Read the facts about the weights from their headers; RunError for dtypes that cannot be right."""
    of_gguf, quantised = kinds_of(folder), bool(config.get("quantization_config"))
    stored: dict[str, int] = {}
    n_numbers = 0
    for file in weight_files(folder):
        with open_weights(file) as tensors:
            for tensor in tensors.keys():  # noqa: SIM118, the library's object is no mapping
                entry = tensors.get_slice(tensor)
                kind, shape = entry.get_dtype(), entry.get_shape()
                stored[kind] = stored.get(kind, 0) + 1
                bits = 1 if kind in _FLOATS else int((re.findall(r"\d+", kind) or [1])[0])
                n_numbers += math.prod(shape) * bits
                if kind not in _FLOATS and not quantised and not of_gguf and tensor.endswith("weight"):
                    raise RunError(
                        f"{file}: {tensor} is {kind}, and config.json says nothing of quantisation: "
                        f"give weights of {', '.join(_FLOATS)}"
                    )
    note, declared = None, config.get("dtype") or config.get("torch_dtype")
    found = [_FLOATS[kind] for kind in stored if kind in _FLOATS]
    if of_gguf:
        note = f"{name}: its weights are stored as {kinds_in_words(of_gguf)}, and are read as float32"
    elif declared is not None and found and declared not in found and not quantised:
        note = f"{name}: its weights are {' and '.join(found)}, though config.json says {declared}"
    return StoredWeights(sum(stored.values()), n_numbers, note)
