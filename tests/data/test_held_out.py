"""The same text never stands in training of one source and in validation of another."""

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birthmark.data.cache import fingerprint
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.documents import OUT, TRAIN, VAL, WITHIN, text_hash
from birthmark.data.prepare import prepare
from birthmark.data.splitting import codes_by_content, duplicates, duplicates_in_words
from birthmark.errors import RunError
from birthmark.trainer.run_folder import _differences


def corpus(texts):
    """As far as splits are concerned: hashes and sizes."""
    contents = np.array([text_hash(text.encode()) for text in texts], dtype=np.uint64)
    return SimpleNamespace(contents=contents, sizes=np.array([len(t) for t in texts]), check_any=lambda: None)


@settings(max_examples=300, deadline=None)
@given(
    sources=st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12), min_size=1, max_size=4)
    | st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3), min_size=2, max_size=5),
    salt=st.integers(0, 50),
    fraction=st.sampled_from([0.01, 0.3, 0.6, 0.99]),
)
def test_a_text_has_one_place_in_all_sources_and_each_has_both_splits(sources, salt, fraction):
    texts = {str(i): [f"{text}{salt}" for text in found] for i, found in enumerate(sources)}
    codes = codes_by_content({name: corpus(found) for name, found in texts.items()}, fraction)
    places = {}
    for name, found in texts.items():
        for text, code in zip(found, codes[name].tolist(), strict=True):
            places.setdefault(text, set()).add(code)
    assert all(len(found) == 1 for found in places.values())
    assert OUT not in set().union(*places.values())
    for found in codes.values():
        assert WITHIN in found or {TRAIN, VAL} <= set(found.tolist())
    # Nothing is divided or moved without need.
    alone = {found[0] for found in texts.values() if len(set(found)) == 1}
    divided = {text for text, found in places.items() if found == {WITHIN}}
    assert alone == divided if len(sources) < 3 else alone <= divided
    by_hash = {text: VAL if text_hash(text.encode()) * 2.0**-64 < fraction else TRAIN for text in places}
    if all(len({by_hash[text] for text in found}) == 2 for found in texts.values()):
        assert places == {text: {code} for text, code in by_hash.items()}
    turned = codes_by_content({name: corpus(texts[name]) for name in reversed(texts)}, fraction)
    assert all((turned[name] == found).all() for name, found in codes.items())


def test_every_source_of_several_texts_has_both_splits():
    texts = {"a": [f"a{i}" for i in range(5)], "b": [f"b{i}" for i in range(5)]}
    for fraction, rare, nearest in ((1e-9, VAL, min), (1 - 1e-9, TRAIN, max)):
        codes = codes_by_content({name: corpus(found) for name, found in texts.items()}, fraction)
        for name, found in texts.items():
            moved = nearest(found, key=lambda text: text_hash(text.encode()))
            assert [text for text, code in zip(found, codes[name], strict=True) if code == rare] == [moved]


def test_texts_of_several_sources_are_counted():
    rng = random.Random(0)
    texts = {name: [str(rng.randrange(30)) for _ in range(40)] for name in "abc"}
    within, across = duplicates({name: corpus(found) for name, found in texts.items()})
    assert within == {name: len(found) - len(set(found)) for name, found in texts.items()}
    places = Counter(text for found in texts.values() for text in set(found))
    assert across == sum(n - 1 for n in places.values())


@pytest.fixture
def config(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(40):
            text = f"both {i} " * 20 if i < 20 else f"{name} {i} " * 20
            (tmp_path / name / f"{name}{i:02d}.txt").write_text(text)
    (tmp_path / "a" / "again.txt").write_text("both 3 " * 20)
    sources = [SourceConfig(str(tmp_path / name)) for name in "ab"]
    return DataConfig(sources=sources, val_fraction=0.3, cache_dir=str(tmp_path / "cache"))


def test_a_mixture_of_folders_does_not_leak(config):
    data = prepare(config, vocab_size=300, seq_len=16)
    train, val = ({name: decoded(data, source.sources[name]) for name in "ab"} for source in (data.train, data.val))
    for i in range(20):
        is_val = {f" both {i} " in val[name] for name in "ab"} | {f" both {i} " not in train[name] for name in "ab"}
        assert len(is_val) == 1, i
    assert data.record["sources"]["a"]["duplicates"] == 1
    assert data.record["duplicates_across_sources"] == 20
    assert duplicates_in_words(data.record) == (
        "documents: 1 repeat an earlier one of their source; 20 texts stand in another source too"
    )
    # By their names, which they had before, some would stand on both sides.
    alone = {
        text
        for one in config.each().values()
        for text in Counter((d.text, d.split) for d in open_corpus(one).documents())
        if text[0].startswith("both")
    }
    assert len(alone) > 20


def test_counts_of_other_sources_are_refused(config):
    prepare(config, vocab_size=300, seq_len=16)
    (meta,) = Path(config.cache_dir).glob("duplicates-*/meta.json")
    content = json.loads(meta.read_text()) | {"within": {"x": 0, "b": 0}}
    del content["checksum"]
    meta.write_text(json.dumps(content | {"checksum": fingerprint(meta=content)}))
    with pytest.raises(RunError, match=r"meta\.json: damaged \(within is not of this run's sources\)"):
        prepare(config, vocab_size=300, seq_len=16)


def decoded(data, source):
    tokens = source.tokens
    return " " + "".join(data.token_texts(tokens.read(np.array([0]), len(tokens))[0].tolist())).replace(
        "␣", " "
    ).replace("<|endoftext|>", " ")


def test_a_run_that_began_before_duplicates_were_counted_goes_on():
    assert not _differences({"content_hash": "a", "duplicates": 3}, {"content_hash": "a"})
    assert not _differences({"content_hash": "a", "duplicates": 3}, {"content_hash": "a", "duplicates": 3})
    assert _differences({"content_hash": "a", "duplicates": 3}, {"content_hash": "a", "duplicates": 4})
    assert _differences({"content_hash": "b"}, {"content_hash": "a"})
    assert _differences({"content_hash": "a"}, {"content_hash": "a", "duplicates": 3})
    assert _differences({"content_hash": "a", "skipped": {}}, {"content_hash": "a"})
