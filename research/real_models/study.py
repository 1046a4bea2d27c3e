"""The figures of docs/real-models.md, for both real models and their controls: one JSON file for each answer.

    python research/real_models/study.py [--only PART,PART/NAME] [--model NAME] [--folder FOLDER]

What a file of results holds already is not made again. Controls: a random twin, which has the config and weights that
`transformers` draws from seed 0; the model in bfloat16, and with linear maps rounded again to 8 and to 4 bits, which
says what of a figure quantisation can have made; and for each ablation others of its kind, drawn by a seed. The text is
the help that Python brings with it (`pydoc_data.topics`), so that every machine with one version of Python reads the
same.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from birthmark.child_python import python_command
from birthmark.errors import RunError
from birthmark.files import write_json, write_text
from birthmark.measure.config import SnapshotConfig
from birthmark.research.real_models.ablations import ABLATIONS, Suspect, ablation
from birthmark.research.real_models.low_bits import rounding_by_place
from birthmark.research.real_models.packages import ModelName, real_model
from birthmark.research.real_models.released_lock import released_lock
from birthmark.research.real_models.variants import Source, variant

RESULTS = Path(__file__).parent / "results"
#: Sequences of the probes: half as many for Gemma 3, whose head is five times as wide.
N_SEQUENCES: dict[ModelName, int] = {"smollm2": 16, "gemma3": 8}
SEQ_LEN = 64
#: Position whose aggregation interventions change, and the first blocks that the paper's mask is given to.
POSITION = 20
MASKED: dict[ModelName, tuple[str, ...]] = {
    "smollm2": ("1", "1..2", "1..3", "1..12", "all"),
    "gemma3": ("1", "1..9", "all"),
}
#: What seems to carry the sink, from the snapshots.
SUSPECTS: dict[ModelName, Suspect] = {
    "smollm2": Suspect(12, (1229, 1487), (3, 12), (90, 430, 1229, 1487), 507),
    "gemma3": Suspect(7, (1824,), (7,), (1824,), 163),
}


class Answer(NamedTuple):
    """One result of a part of the page."""

    name: str
    make: Callable[[], dict[str, Any]]


class Given(NamedTuple):
    """Material of one model's answers."""

    model: ModelName
    source: Source

    def command(self, *words: str) -> dict[str, Any]:
        """Run a command on the model's file; return its answer."""
        return command(words[0], str(self.source.file), *words[1:])

    @property
    def settings(self) -> SnapshotConfig:
        """The probe's size, read in batches that fit a laptop."""
        return SnapshotConfig(n_sequences=N_SEQUENCES[self.model], seq_len=SEQ_LEN, batch_size=8)

    @property
    def probe(self) -> tuple[str, ...]:
        """The options that name it."""
        return "--n_sequences", str(N_SEQUENCES[self.model]), "--seq_len", str(SEQ_LEN)

    @property
    def data(self) -> tuple[str, str]:
        """The option that names the text."""
        return "--data", str(self.source.text)

    def picture(self, name: str) -> tuple[str, str]:
        """Return the option that keeps a command's picture out of the way."""
        return "--out", str(self.source.folder / f"{name}.png")


def command(*words: str) -> dict[str, Any]:
    """Run a command in another process; return its answer, and the command with the names of its files alone."""
    done = subprocess.run(
        python_command("-m", "birthmark.launch.cli", *words, "--json"), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RunError(done.stderr.strip())
    shown = [Path(word).name if word.startswith("/") else word for word in words]
    return {"command": shown, "answer": json.loads(done.stdout)}


def _chain(given: Given) -> Iterator[Answer]:
    snapshot = partial(given.command, "snapshot", *given.probe, *given.data)
    yield Answer("float32", snapshot)
    yield Answer("bfloat16", lambda: snapshot("--dtype", "bfloat16"))
    for name in ("w8", "w4", "twin"):
        yield Answer(name, partial(_of_variant, given, name, "snapshot", *given.probe, *given.data))


def _of_variant(given: Given, name: str, verb: str, *options: str) -> dict[str, Any]:
    """Run a command on a variant, which is made first."""
    return command(verb, str(variant(given.source, name)), *options)


def _interventions(given: Given) -> partial[dict[str, Any]]:
    probe = "random" if given.model == "smollm2" else "bos"
    where = ("--position", str(POSITION), "--probe", probe)
    return partial(given.command, "intervene", *given.probe, *given.picture("intervene"), *where)


def _mask(given: Given) -> Iterator[Answer]:
    for layers in MASKED[given.model]:
        yield Answer(f"mask_{layers}", partial(_interventions(given), "--kind", "mask", "--layers", layers))


def _doses(given: Given) -> Iterator[Answer]:
    change = _interventions(given)
    released = ("--lambda", "1,4,8,16,30", "--around", "values")
    for layers in ("1..3", "all"):
        at: tuple[str, ...] = ("--layers", layers)
        yield Answer(f"amplify_values_{layers}", partial(change, "--kind", "amplify", *at, *released))
        yield Answer(f"scale_matched_values_{layers}", partial(change, "--kind", "scale", "--matched", *at, *released))
    if given.model == "smollm2":
        at = ("--layers", "1..3", "--lambda", "2,4,8,16")
        yield Answer("amplify", partial(change, "--kind", "amplify", *at))
        yield Answer("scale", partial(change, "--kind", "scale", *at[:-1], "2,4,8,16,64"))
        yield Answer("scale_matched", partial(change, "--kind", "scale", "--matched", *at))


def _ablate(given: Given) -> Iterator[Answer]:
    file, text, suspect = given.source.file, given.source.text, SUSPECTS[given.model]
    for name in ABLATIONS if len(suspect.all_units) > 1 else ABLATIONS.keys() - {"units_zero"}:
        yield Answer(name, partial(ablation, name, file, suspect, text, given.settings))


def _first_key(given: Given) -> Iterator[Answer]:
    if given.model == "gemma3":  # none of the families whose cache can let go of keys
        return
    reach = ("--prefix", "256", "--to", "512", "--evict", "0,1,4", "--n_sequences", "8")
    options = (*reach, *given.data, *given.picture("length"))
    yield Answer("evict", partial(given.command, "length", *options))
    yield Answer("evict_twin", partial(_of_variant, given, "twin", "length", *options))


def _bits(given: Given) -> Iterator[Answer]:
    bits = ("--bits", "w8a8,w4a16,w8a4,w4a4", *given.probe, *given.data, *given.picture("quantise"))
    yield Answer("all", partial(_of_variant, given, "float", "quantise", *bits))
    yield Answer("by_place", lambda: rounding_by_place(given.source.file, given.source.text, given.settings))


def _lineage(given: Given) -> Iterator[Answer]:
    changed: tuple[str, ...] = ("bf16", "w8", "w4", "pruned", "twin")
    if given.model == "smollm2":
        changed = (*changed, "tuned", "tuned_pruned", "tuned_pruned_w4")
    out = given.picture("lineage")

    def compare(name: str, *options: str) -> dict[str, Any]:
        return given.command("fingerprint", str(variant(given.source, name)), *options, *out)

    def tuning() -> dict[str, Any]:
        return dict(json.loads((variant(given.source, "tuned") / "about.json").read_text(encoding="utf-8")))

    for name in changed:
        yield Answer(name, partial(compare, name, "--n_inputs", "100"))
        yield Answer(f"{name}_weights", partial(compare, name, "--null", "matched"))
    if given.model == "smollm2":
        yield Answer("tuning", tuning)


def _released(given: Given) -> Iterator[Answer]:
    channel = SUSPECTS[given.model].channel
    yield Answer("lock", lambda: released_lock(given.source.file, channel, given.source.text, given.settings))


#: Part of the page → its answers.
PARTS: Mapping[str, Callable[[Given], Iterator[Answer]]] = {
    "chain": _chain,
    "mask": _mask,
    "doses": _doses,
    "ablate": _ablate,
    "first_key": _first_key,
    "bits": _bits,
    "lineage": _lineage,
    "released": _released,
}


def text_folder(folder: Path) -> Path:
    """Write each topic of Python's help as a text."""
    from pydoc_data.topics import topics

    texts = folder / "python-help"
    for name, text in sorted(topics.items()):
        write_text(texts / f"{name}.txt", text)
    return texts


def save(model: ModelName, part: str, answer: Answer) -> None:
    """Make an answer and save it, unless it exists."""
    out = RESULTS / model / f"{part}_{answer.name.replace('..', '-')}.json"
    if out.exists():
        return
    start = time.monotonic()
    try:
        made = answer.make()
    except RunError as error:
        print(f"{model} {part} {answer.name}: {error}", file=sys.stderr)
        return
    seconds = time.monotonic() - start
    write_json(out, {"processor": platform.processor() or platform.machine()} | made)
    print(f"{model:8} {part:10} {answer.name:24} {seconds:6.0f} s", flush=True)


def main() -> None:
    """Make every result that is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"of {', '.join(PARTS)}, with commas between; by default all")
    parser.add_argument("--model", choices=list(SUSPECTS), help="by default both")
    parser.add_argument("--folder", type=Path, default=Path("real-models"), help="where variants and text are written")
    options = parser.parse_args()
    folder = options.folder.absolute()
    wanted = set(options.only.split(",")) - {""} or set(PARTS)
    if unknown := {one for one in wanted if one.partition("/")[0] not in PARTS}:
        parser.error(f"--only {min(unknown)}: give some of {', '.join(PARTS)}, or PART/NAME for one answer")
    text = text_folder(folder)
    for model in [options.model] if options.model else SUSPECTS:
        given = Given(model, Source(real_model(model), folder, text))
        for part in PARTS:
            for answer in PARTS[part](given):
                if wanted & {part, f"{part}/{answer.name}"}:
                    save(model, part, answer)


if __name__ == "__main__":
    main()
