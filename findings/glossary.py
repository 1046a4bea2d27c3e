"""Words that a reader may not know, each explained once: pages say it on hover, docs/quantities.md lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup, escape


@dataclass(frozen=True)
class Term:
    """A word or a symbol."""

    meaning: str
    """Explanation in a sentence or two of plain text."""
    section: str = ""
    """Section of docs/definitions.md that defines it; "" where none does."""
    also: tuple[str, ...] = ()
    """Other forms of it that are explained too."""


TERMS: Mapping[str, Term] = {
    "alignment": Term("Mean cosine of the hidden states at the last position with the seed direction.", "3"),
    "birth": Term("The model as its seed drew it, before any training.", "1"),
    "contraction": Term("Mean cosine between hidden states: of different inputs (inter), or within one (intra).", "3"),
    "dominance ratio": Term("Largest channel of a hidden state over the mean of its channels, in absolute size.", "7"),
    "drift": Term("Cosine of today's mean direction with the seed direction; 1 is birth.", "3"),
    "effective rank": Term(
        "How many directions hidden states fill: the exponential of the entropy of their singular values.", "7"
    ),
    "gradient sink": Term(
        "How much more loss gradient comes back to the first position than to the others; 1 is no more.", "16"
    ),
    "importance": Term("Mean attention that a key receives from the queries at and after it.", "5"),
    "k": Term("In a lineage test: the dimensions that were compared.", "10"),
    "kin": Term("Models from one birth, as far as the lineage test says: p < 0.01 and z > 0.", "10"),
    "lineage test": Term(
        "Whether two models rank the same inputs alike in the same dimensions, which only a shared birth explains.",
        "10",
    ),
    "massive activation": Term(
        "A value of the residual stream far above the others, in few channels and positions.", "7",
        ("massive activations",),
    ),
    "n_eff": Term(
        "Effective number of tokens that a position averages over: 1 / Σ a². Uniform attention gives t + 1.", "6"
    ),
    "N": Term("In a lineage test: the inputs that every model read.", "10"),
    "null": Term("What a test expects of strangers: the distribution that z is measured in.", "10"),
    "p̄": Term("Mean prediction of the next token over the probe, one share for each token.", "4"),
    "preference ratio": Term("V · max p̄: how many times its even share the favourite token gets; 1 is none.", "4"),
    "probe": Term(
        "What a model is shown when it is measured: random tokens (the same for every model), or held-out text.", "2"
    ),
    "QK lock": Term("How far the first key lies along the main direction of the queries; 1 is fully.", "7"),
    "rank persistence": Term("Spearman's ρ between today's order of preferred tokens and that at birth.", "4"),
    "robust z": Term("Distance from the median over 1.4826 times the median absolute deviation.", "7"),
    "seed direction": Term(
        "Mean direction in which the newborn model sends random inputs; the seed alone decides it.", "3",
        ("seed's direction",),
    ),
    "sink mass": Term("Mean attention that queries after the first spend on position 0.", "5"),
    "sink rate": Term("Share of (sequence, layer, head) in which the importance of position 0 exceeds ε.", "5"),
    "stranger": Term(
        "A birth of the same config from another seed: a control, for what two unrelated models share by chance.", "10",
        ("strangers",),
    ),
    "super neuron": Term(
        "A hidden unit of the MLP that fires at position 0 alone: robust z at least 10, and 5 times the others.", "7",
        ("super neurons",),
    ),
    "unigram entropy": Term("Loss of a model that knows how often each token occurs, and nothing else."),
    "uniform attention": Term("Attention with the same weight on every key that a query may see: a control.", "5"),
    "z": Term("Distance from what is expected by chance, in standard deviations of chance.", "10"),
    "ε": Term("Importance above which a key counts as a sink; 0.3 is published.", "5"),
    "σ²(0)": Term("Variance over inputs of what position 0 aggregates.", "6"),
    "σ²(late)": Term("Mean variance over inputs of what positions of the later half aggregate.", "6"),
}  # fmt: skip
"""Terms by word, in the order of the glossary."""

#: In running text, words of one letter and everyday ones would be underlined everywhere.
_NOT_IN_TEXT = {"k", "N", "z", "birth", "probe", "null", "importance", "alignment", "contraction"}
_FORMS = {form: term.meaning for name, term in TERMS.items() if name not in _NOT_IN_TEXT for form in (name, *term.also)}
_FOUND = re.compile(
    "|".join(rf"(?<![\w.]){re.escape(form)}(?![\w̄])" for form in sorted(_FORMS, key=len, reverse=True)), re.IGNORECASE
)
_BY_FORM = {form.lower(): meaning for form, meaning in _FORMS.items()}


def explained(text: str) -> Markup:
    """Escape ``text``, and explain each word of the glossary on hover at its first occurrence."""
    parts: list[Markup] = []
    seen: set[str] = set()
    end = 0
    for found in _FOUND.finditer(str(text)):
        meaning = _BY_FORM[found[0].lower()]
        if meaning in seen:
            continue
        seen.add(meaning)
        parts.append(escape(str(text)[end : found.start()]))
        parts.append(Markup('<abbr title="{}">{}</abbr>').format(meaning, found[0]))
        end = found.end()
    return Markup("").join([*parts, escape(str(text)[end:])])
