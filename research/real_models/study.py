"""The commands that docs/real-models.md rests on, for both real models and their controls: one JSON file each.

    python research/real_models/study.py [--only PART,PART] [--folder FOLDER]

What a file of results holds already is not made again. Controls beside a model: a random twin, which has its config and
weights that `transformers` draws from seed 0; the model in bfloat16; and the model with linear maps rounded to 8 bits,
each row by a scale of its own, which says what of a figure quantisation can have made. The text is the help that Python
brings with it (`pydoc_data.topics`), so that every machine with one version of Python reads the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from birthmark.child_python import python_command
from birthmark.files import write_json, write_text
from birthmark.research.real_models.packages import ModelName, real_model

RESULTS = Path(__file__).parent / "results"
PROBE = ("--n_sequences", "16", "--seq_len", "64")
#: Position whose aggregation interventions change, and the first blocks that the paper's mask is given to.
POSITION = 20
MASKED: dict[ModelName, tuple[str, ...]] = {
    "smollm2": ("1", "1..2", "1..3", "1..12", "all"),
    "gemma3": ("1", "1..9", "all"),
}
#: The hidden unit and the channel of SmolLM2's massive activation, each with a control of the same kind.
ABLATED = {
    "unit": ("--kind", "ablate_unit", "--layers", "12", "--units", "1229"),
    "unit_control": ("--kind", "ablate_unit", "--layers", "12", "--units", "100"),
    "channel": ("--kind", "ablate_channel", "--layers", "12", "--channels", "507"),
    "channel_control": ("--kind", "ablate_channel", "--layers", "12", "--channels", "100"),
    "first_value": ("--kind", "ablate_value", "--layers", "all", "--position", "0"),
    "value_control": ("--kind", "ablate_value", "--layers", "all", "--position", "5"),
}


class Call(NamedTuple):
    """A command whose answer is a result."""

    part: str
    model: ModelName
    name: str
    words: list[str]


def text_folder(folder: Path) -> Path:
    """Write each topic of Python's help as a text."""
    from pydoc_data.topics import topics

    texts = folder / "python-help"
    for name, text in sorted(topics.items()):
        write_text(texts / f"{name}.txt", text)
    return texts


def controls(file: Path, folder: Path) -> dict[str, Path]:
    """Write the twin and the rounded model of a GGUF file as folders of ``transformers``, once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    found = {name: folder / f"{file.stem}-{name}" for name in ("twin", "w8", "float")}
    for name, out in found.items():
        if out.exists():
            continue
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if name != "twin":
            read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            model.load_state_dict(read.state_dict())
        for module in model.get_decoder().modules() if name == "w8" else ():
            if isinstance(module, torch.nn.Linear):
                step_O1 = module.weight.data.abs().amax(1, keepdim=True) / 127
                module.weight.data = (module.weight.data / step_O1).round() * step_O1
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    return found


def calls(model: ModelName, folder: Path) -> Iterator[Call]:
    """List the commands of a model, in the order of the page."""
    file, text = real_model(model), text_folder(folder)
    beside, data = controls(file, folder), ("--data", str(text))

    snapshot = partial(Call, "chain", model)
    yield snapshot("float32", ["snapshot", str(file), *PROBE, *data])
    yield snapshot("bfloat16", ["snapshot", str(file), *PROBE, *data, "--dtype", "bfloat16"])
    for name in ("w8", "twin"):
        yield snapshot(name, ["snapshot", str(beside[name]), *PROBE, *data])

    intervene = ["intervene", str(file), *PROBE, "--out", str(folder / "intervene.png")]
    at = [*intervene, "--position", str(POSITION), "--probe", "random" if model == "smollm2" else "bos"]
    for layers in MASKED[model]:
        yield Call("mask", model, f"mask_{layers}", [*at, "--kind", "mask", "--layers", layers])
    if model == "smollm2":
        doses = ["--layers", "1..3", "--lambda", "2,4,8,16"]
        yield Call("doses", model, "amplify", [*at, "--kind", "amplify", *doses])
        yield Call("doses", model, "amplify_values", [*at, "--kind", "amplify", "--around", "values", *doses])
        yield Call("doses", model, "scale", [*at, "--kind", "scale", "--layers", "1..3", "--lambda", "2,4,8,16,64"])
        yield Call("doses", model, "scale_matched", [*at, "--kind", "scale", "--matched", *doses])
        for name, options in ABLATED.items():
            yield Call("ablate", model, name, [*intervene, "--probe", "text", *data, *options])

    yield Call("first_key", model, "evict", ["length", str(file), "--to", "512", "--evict", "1,4", "--n_sequences", "8",
                                             *data, "--out", str(folder / "length.png")])  # fmt: skip
    bits = ["--bits", "w8a8,w4a16,w4a4", *PROBE, *data, "--out", str(folder / "quantise.png")]
    yield Call("bits", model, "bits", ["quantise", str(beside["float"]), *bits])
    inputs = ["--n_inputs", "200", "--out", str(folder / "lineage.png")]
    for name in ("w8", "twin"):
        yield Call("lineage", model, name, ["fingerprint", str(file), str(beside[name]), *inputs])


def answer(call: Call) -> None:
    """Run a command, unless its result exists, and save its answer."""
    out = RESULTS / call.model / f"{call.part}_{call.name.replace('..', '-')}.json"
    if out.exists():
        return
    command = python_command("-m", "birthmark.launch.cli", *call.words, "--json")
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - start
    if done.returncode != 0:
        print(f"{call.model} {call.name}: {done.stderr.strip()}", file=sys.stderr)
        return
    words = [Path(word).name if word.startswith("/") else word for word in call.words]
    about = {"command": words, "seconds": round(seconds, 1), "processor": platform.processor() or platform.machine()}
    write_json(out, about | {"answer": json.loads(done.stdout)})
    print(f"{call.model:8} {call.part:10} {call.name:20} {seconds:6.0f} s", flush=True)


def main() -> None:
    """Make every result that is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts with commas between; by default all")
    parser.add_argument("--folder", type=Path, default=Path("real-models"), help="where controls and text are written")
    options = parser.parse_args()
    wanted = set(options.only.split(",")) - {""}
    for model in ("smollm2", "gemma3"):
        for call in calls(model, options.folder.absolute()):
            if not wanted or call.part in wanted:
                answer(call)


if __name__ == "__main__":
    main()
