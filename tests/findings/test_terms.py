"""Words are explained where they stand, once, and no text becomes markup by it."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark.findings.glossary import TERMS, explained


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("n_eff of strangers, and strangers again", ["n_eff", "strangers"]),
        ("Sink mass: p̄ and σ²(0)/σ²(late)", ["Sink mass", "p̄", "σ²(0)", "σ²(late)"]),
        (
            "The seed's direction survives: 0.151 against at most 0.019 for 2 strangers.",
            ["seed's direction", "strangers"],
        ),
        ("kindness, unkind, mean_n_eff and n_eff_normalised", []),
        ("robust z", ["robust z"]),
    ],
)
def test_words_are_found_whole_and_once(text, marked):
    assert re.findall(r"<abbr title=\"[^\"]+\">([^<]+)</abbr>", html.unescape(explained(text))) == marked


@pytest.mark.heavy
@given(st.lists(st.sampled_from([*TERMS, "<b>", "&amp;", 'stranger"><script>', " ", "\n", "p̄"]) | st.text(max_size=5)))
def test_nothing_but_the_explanations_is_markup(words):
    text = " ".join(words)
    made = str(explained(text))
    plain = re.sub(r"<abbr title=\"[^\"<>]*\">([^<>]*)</abbr>", r"\1", made)
    assert "<" not in plain
    assert ">" not in plain
    assert html.unescape(plain) == text


def test_every_meaning_is_a_plain_sentence():
    for name, term in TERMS.items():
        assert term.meaning.endswith("."), name
        assert re.fullmatch(r"(1[0-7]|[1-9])?", term.section), name
