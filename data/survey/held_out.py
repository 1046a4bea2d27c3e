"""Validation documents that occur in no source's training documents, and counts of duplicates.

In a mixture the text of a document decides its split, not its name: the same text then has the same split in every
source. Texts are compared by 64-bit hashes; among 10⁹ texts, two share one by chance with a probability of 3 %.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..splits import OUT, TRAIN, VAL, WITHIN, below
from .documents import SurveyedCorpus


def codes_by_content(corpora: Mapping[str, SurveyedCorpus], val_fraction: float) -> dict[str, np.ndarray]:
    """Return the code of each document's use for several corpora: uint8 ``[n]`` each (`birthmark.data.splits`).

    A source whose documents all fall on one side moves the nearest text to the other, in every source. One that holds a
    single text, once or many times, gives the end of that text; other sources leave the text out.
    """
    codes, single = {}, []
    for name, corpus in corpora.items():
        corpus.check_any()
        used = corpus.sizes > 0
        codes[name] = np.where(used, below(corpus.contents, val_fraction), OUT).astype(np.uint8)
        first = corpus.contents[used.argmax()]
        if (corpus.contents[used] == first).all():
            single.append(first)
            codes[name][used] = WITHIN
    moved: dict[int, int] = {}
    for name, corpus in corpora.items():
        if (codes[name] == WITHIN).any():
            continue
        contents, of_source = corpus.contents, codes[name]
        of_source[np.isin(contents, single) & (of_source != OUT)] = OUT
        for content, code in moved.items():
            of_source[(contents == content) & (of_source != OUT)] = code
        for side, other in ((VAL, TRAIN), (TRAIN, VAL)):
            here = contents[of_source == other]
            if not (of_source == side).any() and len(free := np.setdiff1d(here, np.array([*moved], np.uint64))):
                moved[int(free.min() if side == VAL else free.max())] = side
                of_source[contents == (free.min() if side == VAL else free.max())] = side
    # A text that a later source moved is moved in earlier ones too.
    for name, corpus in corpora.items():
        for content, code in moved.items():
            codes[name][(corpus.contents == content) & (codes[name] < OUT)] = code
    return codes


def duplicates(corpora: Mapping[str, SurveyedCorpus]) -> tuple[dict[str, int], int]:
    """Count documents whose text occurs earlier in their own source, by source; and surplus copies of texts across
    sources.

    The second number counts, for each text, the sources that hold it beyond the first.
    """
    texts = {name: np.unique(corpus.contents[corpus.sizes > 0]) for name, corpus in corpora.items()}
    within = {name: int((corpora[name].sizes > 0).sum()) - len(found) for name, found in texts.items()}
    if len(texts) < 2:
        return within, 0
    return within, sum(map(len, texts.values())) - len(np.unique(np.concatenate(list(texts.values()))))
