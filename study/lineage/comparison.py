"""The lineage test: how models are compared, what is kept of each, and those that share a birth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, log10
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import Namespace

from ...errors import UsageError
from ...measure.hf import HFConfig, HFModel
from ...measure.hidden_states import FingerprintProbe, cached_hidden_states, hidden_states
from ...measure.stream_weights import stream_weights
from ...metrics.config import LineageTestConfig, Null
from ...metrics.matched_weights import StreamWeights, compare_weights
from ...metrics.seedprint import FEWEST_INPUTS, LEVEL, Fingerprint, HiddenStates, bonferroni, compare
from ...models.birth import born
from ...models.by_block import DecoderByBlock
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from ...trainer.by_name.model_names import AnySource, ModelSource, add_tokens
from ...trainer.config_file import build_group
from ...trainer.devices import device
from ..study_file import Reader, where
from .options import ProbeOptions

# ---------------------------------------------------------------- evidence that is kept of a model

#: The one null that reads weights; all others read hidden states.
_OF_WEIGHTS = "matched"


@dataclass(frozen=True)
class Evidence:
    """Evidence about a model for the nulls in question."""

    hidden: HiddenStates | None
    """Hidden states over the probe; None if no null reads them."""
    weights: StreamWeights | None
    """Weights of the residual stream; None if no null reads them."""


def evidence_of(
    model: Decoder | HFModel,
    nulls: Iterable[Null],
    hidden: Callable[[Decoder | HFModel], np.ndarray],
) -> Evidence:
    """Collect the evidence about a model for these nulls; ``hidden``, called if one needs it, returns hidden states
    ``[N, D]``.
    """
    asked = set(nulls)
    return Evidence(
        HiddenStates(hidden(model)) if asked - {_OF_WEIGHTS} else None,
        stream_weights(model) if _OF_WEIGHTS in asked else None,
    )


def compare_evidence(
    a: Evidence, b: Evidence, recipe: LineageTestConfig, probe: FingerprintProbe, vocab_size: int | None = None
) -> Fingerprint:
    """Test two models by their evidence, which must include that of the recipe's null."""
    if recipe.null == _OF_WEIGHTS:
        assert a.weights is not None
        assert b.weights is not None
        return compare_weights(a.weights, b.weights)
    assert a.hidden is not None
    assert b.hidden is not None
    return compare(a.hidden, b.hidden, recipe, probe=probe.kind, vocab_size=vocab_size)


# ---------------------------------------------------------------- the probe that models see, and the recipe of the test

#: Names of the fields of a probe and of a recipe.
PROBE_FIELDS = tuple(field.name for field in dataclasses.fields(ProbeOptions))
RECIPE_FIELDS = tuple(field.name for field in dataclasses.fields(LineageTestConfig))


@dataclass(frozen=True)
class Comparison:
    """Settings of the test of every pair of models."""

    probe: FingerprintProbe
    """Inputs of both models."""
    seq_len: int | None
    """Tokens in a sequence of the probe, where a user gives them. The probe's own length is chosen with the models."""
    recipe: LineageTestConfig
    """Recipe from hidden states to a verdict."""


def _comparison(fields: Mapping[str, Any], mark: str = "") -> Comparison:
    recipe = LineageTestConfig(**{name: fields[name] for name in RECIPE_FIELDS})
    if problems := recipe.problems():
        raise UsageError("; ".join(f"{mark}{problem}" for problem in problems))
    check_probe(recipe, fields["probe"], mark)
    probe = FingerprintProbe(kind=fields["probe"], n_inputs=fields["n_inputs"], probe_seed=fields["probe_seed"])
    return Comparison(probe, fields["seq_len"], recipe)


def check_probe(recipe: LineageTestConfig, kind: str, mark: str = "") -> None:
    """Raise UsageError for inputs of a kind that the recipe's null does not read."""
    if recipe.null == "matched" and kind != "token":
        raise UsageError(f"{mark}probe {kind}: the null matched reads weights, no inputs; leave it out")


def read_comparison(fields: Mapping[str, Any]) -> Comparison:
    """Read a comparison from fields of a YAML file; missing fields have their defaults.

    Raises:
        UsageError: a value of another type, or an impossible recipe; the message names the field.
    """
    return _comparison(vars(build_group(ProbeOptions, fields)) | vars(build_group(LineageTestConfig, fields)))


def comparison_of(options: Namespace) -> Comparison:
    """Build the comparison from a command's options; without ``--null``, under the default null.

    Raises:
        UsageError: an impossible recipe; the message names the option.
    """
    return _comparison({**vars(options), "null": options.null or LineageTestConfig.null}, mark="--")


def describe_probe(probe: FingerprintProbe) -> str:
    """Describe a probe in words."""
    inputs = "random tokens" if probe.kind == "token" else "Gaussian vectors in place of embeddings"
    return f"{probe.n_inputs} sequences of {probe.seq_len} {inputs}"


# ---------------------------------------------------------------- tests in a study file


def read_tests(
    reader: Reader, content: Mapping[str, Any], prefixes: Mapping[str, str], default: Mapping[str, Any]
) -> dict[str, Comparison]:
    """Read the tests of a study, by name, from its fields ``test`` and ``tests``.

    Args:
        reader: reader of the file.
        content: the study's fields.
        prefixes: places of fields that are not at the top of the file.
        default: default of ``tests``.

    Raises:
        UsageError: a field is invalid; the message names the file, the field and the value.
    """
    shared_at, tests_at = (where(prefixes, field) for field in ("test", "tests"))
    shared, tests = _options(reader, content.get("test", {}), shared_at), content.get("tests", dict(default))
    if not reader.named(tests, tests_at):
        raise reader.wrong(tests_at, tests, "name at least one")
    return {test: _test_of_file(reader, fields, shared, f"{tests_at}.{test}") for test, fields in tests.items()}


def _options(reader: Reader, value: Any, at: str) -> dict[str, Any]:
    """Read the fields of a probe and of a recipe."""
    # YAML reads an unquoted `null` as none, also where it is a field's name.
    options = {"null" if name is None else name: option for name, option in reader.group(value, at).items()}
    reader.known(options, (*PROBE_FIELDS, *RECIPE_FIELDS), f"{at}.")
    return options


def _test_of_file(reader: Reader, fields: Any, shared: dict[str, Any], at: str) -> Comparison:
    options = shared | _options(reader, fields, at)
    if options.get("null", ...) is None:
        del options["null"]
    try:
        return read_comparison(options)
    except UsageError as error:
        raise UsageError(f"{reader.file}: {at}: {error}") from None


# ---------------------------------------------------------------- models that share a birth

#: Tokens of a probe sequence, by default and where the models can read as many.
SEQ_LEN = 64
_MOST_INPUTS = 1 << 20
#: Tokens of a sequence for models that read any number.
_LONGEST = 1 << 20
#: Seeds of strangers count from here: far from those that people give.
_STRANGERS_FROM = 0x5EED_0000_0000
#: The same for torch's generator, which knows the last 32 bits of a seed alone.
_STRANGER_SEEDS_FROM = 0x5EED_0000


@dataclass(frozen=True)
class ModelPair:
    """A test of two models."""

    a: int
    """The first model's index in the list of models."""
    b: int
    """The second's."""
    fingerprint: Fingerprint


@dataclass(frozen=True)
class ComparedModels:
    """Tests of some models."""

    probe: FingerprintProbe
    """Common probe, adapted to the first model (`FingerprintProbe.like`)."""
    pairs: list[ModelPair]
    """Tests of every pair."""
    strangers: list[Fingerprint]
    """Tests of every model against births of other seeds, as the control."""


#: Parameters from which on the full probe takes minutes on a CPU.
_LARGE = 50_000_000
#: Changed copies of a model of 135M have the same verdicts with so few (docs/lineage.md).
_INPUTS_OF_LARGE = 500


def default_inputs(configs: Iterable[ModelConfig | HFConfig]) -> int:
    """Return the default number of sequences in a probe: fewer if one of the models is large."""
    sizes = [12 * config.n_layers * config.d_model**2 + config.vocab_size * config.d_model for config in configs]
    return _INPUTS_OF_LARGE if max(sizes) > _LARGE else FingerprintProbe.n_inputs


def choose_probe(
    probe: FingerprintProbe, seq_len: int | None, configs: Iterable[ModelConfig | HFConfig]
) -> FingerprintProbe:
    """Return the probe at ``seq_len``, by default 64 or as many tokens as all models can read.

    Raises:
        UsageError: too few or too many inputs; a length that a model cannot read.
    """
    longest = min((config.max_seq_len for config in configs if config.max_seq_len is not None), default=_LONGEST)
    length = min(SEQ_LEN, longest) if seq_len is None else seq_len
    if not FEWEST_INPUTS <= probe.n_inputs <= _MOST_INPUTS:
        raise UsageError(f"--n_inputs {probe.n_inputs}: give {FEWEST_INPUTS} to {_MOST_INPUTS}")
    if not 1 <= length <= longest:
        raise UsageError(f"--seq_len {length}: give 1 to {longest}, which is what all of the models can read")
    return replace(probe, seq_len=length)


def tests_that_fit(file: Path, tests: Mapping[str, Comparison], config: ModelConfig) -> dict[str, Comparison]:
    """Return the tests of a study file, with probes of a length that its models can read.

    Raises:
        UsageError: there is no such length; the message names the test.
    """
    found = {}
    for name, test in tests.items():
        try:
            found[name] = replace(test, probe=choose_probe(test.probe, test.seq_len, [config]))
        except UsageError as error:
            raise UsageError(f"{file}: tests.{name}: {error}") from None
    return found


def check_comparable(sources: Sequence[AnySource], probe: FingerprintProbe) -> None:
    """Raise UsageError if two of the models cannot read the same inputs or have no dimensions to pair."""
    first = sources[0]
    for other in sources[1:]:
        of_first, of_other = first.config, other.config
        if of_first.d_model != of_other.d_model:
            raise UsageError(
                f"{first.name} has width {of_first.d_model}, {other.name} {of_other.d_model}: "
                "only dimensions of one width can be paired"
            )
        if probe.kind == "token" and of_first.vocab_size != of_other.vocab_size:
            raise UsageError(
                f"{first.name} has {of_first.vocab_size} tokens, {other.name} {of_other.vocab_size}: "
                "they cannot read the same ids; give births of the run's own config.yaml, or --probe embedding"
            )
    if probe.kind == "token":
        tokens: dict[int, tuple[str, str]] = {}
        for source in sources:
            if source.tokenizer is not None:
                add_tokens(tokens, source.name, source.tokenizer, "give --probe embedding")


def _loaded(source: AnySource) -> Decoder | HFModel:
    model = source.load()
    # Models by block keep only their current block on a device.
    return model if isinstance(model, DecoderByBlock) else model.to(device())


def _whole_birth(config: ModelConfig, init_seed: int) -> Decoder:
    return born(config, init_seed, device())


def _check_draws(recipe: LineageTestConfig, n_tests: int, what: str) -> None:
    """Raise UsageError if no test among so many could be significant once corrected for their number: a share of random
    pairings is at least one in all of them and the pairing itself.
    """
    fewest = round(n_tests / LEVEL)
    if recipe.null == "dimensions_sampled" and recipe.n_draws < fewest:
        raise UsageError(
            f"--draws {recipe.n_draws}: p counts all {n_tests} {what}, and so few draws leave none below {LEVEL}; "
            f"give at least {fewest}, or --null dimensions"
        )


def compare_models(
    sources: Sequence[AnySource],
    probe: FingerprintProbe,
    recipe: LineageTestConfig,
    cache_dir: Path,
    advance: Callable[[int], object] = lambda n_inputs: None,
    n_strangers: int = 0,
    new_birth: Callable[[ModelConfig, int], Decoder] = _whole_birth,
) -> ComparedModels:
    """Test every pair of models, and each of them against strangers: births of the first one's config.

    Each model is loaded once, and run unless its hidden states are in ``cache_dir``. ``advance`` is called with the
    number of inputs of every model that is done. ``new_birth`` gives births of a config from a seed.

    Raises:
        UsageError: without strangers, so many pairs that no share of sampled pairings could be significant.
    """
    if not n_strangers:
        _check_draws(recipe, comb(len(sources), 2), "pairs")
    kept: list[Evidence] = []

    def evidence(model: Decoder | HFModel) -> Evidence:
        found = evidence_of(model, (recipe.null,), lambda model: cached_hidden_states(model, probe, cache_dir))
        advance(probe.n_inputs)
        return found

    for source in sources:
        model = _loaded(source)
        if not kept:
            probe = probe.like(model)
        kept.append(evidence(model))
        del model
    vocab_size = sources[0].config.vocab_size

    def test(a: Evidence, b: Evidence) -> Fingerprint:
        return compare_evidence(a, b, recipe, probe, vocab_size)

    pairs = [ModelPair(a, b, test(kept[a], kept[b])) for a, b in combinations(range(len(sources)), 2)]
    strangers: list[Fingerprint] = []
    first = sources[0]
    for i in range(n_strangers):
        if isinstance(first, ModelSource):
            newborn: Decoder | HFModel = new_birth(first.config, _STRANGERS_FROM + i)
        else:
            newborn = first.stranger(_STRANGER_SEEDS_FROM + i, device())
        stranger = evidence(newborn)
        strangers += [test(own, stranger) for own in kept]
    return ComparedModels(probe, pairs, strangers)


def rank_seeds(
    source: AnySource,
    config: ModelConfig,
    candidates: Sequence[int],
    probe: FingerprintProbe,
    recipe: LineageTestConfig,
    cache_dir: Path,
    advance: Callable[[int], object] = lambda n_seeds: None,
    new_birth: Callable[[ModelConfig, int], Decoder] = _whole_birth,
) -> tuple[FingerprintProbe, list[tuple[int, Fingerprint]]]:
    """Test a model against a birth of ``config`` from every candidate seed.

    Births are made one at a time, by ``new_birth``, and not kept. p and the verdict are corrected for all candidates
    (Bonferroni).

    Returns:
        The probe that all were shown, like the model; the seeds with their tests, best first, undefined ones last.

    Raises:
        UsageError: so many candidates that no share of sampled pairings could be significant.
    """
    _check_draws(recipe, len(candidates), "candidates")
    model = _loaded(source)
    probe = probe.like(model)
    nulls = (recipe.null,)
    own = evidence_of(model, nulls, lambda model: cached_hidden_states(model, probe, cache_dir))
    del model
    found: list[tuple[int, Fingerprint]] = []
    for seed in candidates:
        birth = evidence_of(new_birth(config, seed), nulls, lambda model: hidden_states(model, probe))
        result = compare_evidence(own, birth, recipe, probe, config.vocab_size)
        if result.verdict != "undefined":
            log10_p = bonferroni(result.log10_p, len(candidates))
            stands_out = result.z > 0 and log10_p < log10(LEVEL)
            result = replace(result, log10_p=log10_p, verdict="kin" if stands_out else "stranger")
        found.append((seed, result))
        advance(1)
    return probe, sorted(found, key=lambda item: -np.inf if np.isnan(item[1].z) else item[1].z, reverse=True)
