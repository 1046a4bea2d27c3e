"""Text to token ids and back: a byte-level BPE trained on the corpus, or any ``tokenizers`` JSON file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typing_extensions import TypedDict

from ..errors import UsageError
from ..files import parse_json, read_bytes, read_json, user_path
from ..messages import one_line

END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")
_MIN_VOCAB_SIZE = 257  # 256 bytes and the end of text
_MIN_FREQUENCY = 2  # a pair seen once says nothing about the language
MOST_BYTES = 1 << 28
"""Largest accepted size of a tokenizer's JSON file, in bytes."""


class NamedToken(TypedDict):
    """A token as ``transformers`` writes one with its settings."""

    content: str


class TokenizerConfig(TypedDict):
    """``tokenizer_config.json`` of ``transformers``, as far as it is read here."""

    add_bos_token: NotRequired[bool | None]
    bos_token: NotRequired[str | NamedToken | None]


class TextTokenizer:
    """A ``tokenizers`` JSON with the methods that a corpus needs: ids by batch, the end-of-text id, readable tokens.

    Text is encoded as text: the name of a special token that occurs in a document is spelled out and never becomes
    that token, nothing is added around a document, and padding and truncation of the file are switched off.

    Args:
        content: the JSON.
        name: name of the file, for messages.
        bos: the beginning-of-sequence token (BOS), as ``tokenizer_config.json`` names it.
        add_bos: put it before texts if the JSON itself puts nothing there.

    Raises:
        UsageError: ``content`` is not a tokenizer, or one whose steps could fill the memory from a short text, or
            ``bos`` is not one of its tokens.
    """

    def __init__(
        self, content: bytes, name: str = "tokenizer.json", *, bos: str | None = None, add_bos: bool = False
    ) -> None:
        self.content = content
        self.name = name
        self._bos, self._add_bos = bos, add_bos
        try:
            text = content.decode("utf-8")
            growth = _growth(text)
            if growth <= _MOST_GROWTH:
                self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(
                f"data.tokenizer: {name!r} is not a tokenizers JSON file ({one_line(error)}); give one"
            ) from error
        if growth > _MOST_GROWTH:
            raise UsageError(
                f"data.tokenizer: {name!r} may write {growth:.2g} characters or tokens for one, of {_MOST_GROWTH:,} at "
                "most; give one with fewer Replace, Prepend or special tokens behind one another"
            )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        if add_bos and bos is not None and self._tokenizer.token_to_id(bos) is None:
            raise UsageError(
                f"{name}: tokenizer_config.json adds bos_token {bos!r}, which is none of its tokens; give one that is"
            )

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        """Read a ``tokenizers`` JSON file, and the BOS settings of a ``tokenizer_config.json`` beside it.

        Raises:
            UsageError: no such file, or it is no tokenizer.
            RunError: a damaged ``tokenizer_config.json``.
        """
        path = user_path(path)
        try:
            content = read_bytes(path, MOST_BYTES, UsageError)
        except UsageError as error:
            raise UsageError(f"data.tokenizer: {error}; give 'bpe' or a tokenizers JSON file") from None
        beside = path.with_name("tokenizer_config.json")
        if path.name != "tokenizer.json" or not beside.exists():
            return cls(content, str(path))
        config = read_json(beside, TokenizerConfig, "give the one that the model came with")
        named = config.get("bos_token")
        bos = named["content"] if isinstance(named, dict) else named
        return cls(content, str(path), bos=bos, add_bos=bool(config.get("add_bos_token")))

    @classmethod
    def of(cls, tokenizer: Any) -> TextTokenizer:
        """Convert a tokenizer of any kind: one of this class, the path of a ``tokenizers`` JSON, or a fast one of
        ``transformers``.

        Raises:
            UsageError: the tokenizer is of another kind.
        """
        if isinstance(tokenizer, TextTokenizer):
            return tokenizer
        if isinstance(tokenizer, (str, Path)):
            return cls.load(tokenizer)
        if isinstance(backend := getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
            name, bos = str(getattr(tokenizer, "name_or_path", "")), getattr(tokenizer, "bos_token", None)
            # The library has put its additions into the backend.
            return cls(backend.to_str().encode("utf-8"), name, bos=bos)
        raise UsageError(
            f"tokenizer: {type(tokenizer).__name__} is no fast tokenizer of transformers; give one, or the path of its "
            "tokenizer.json"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.content, "name": self.name, "bos": self._bos, "add_bos": self._add_bos}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The library's own pickling forgets encode_special_tokens.
        self.__init__(**state)  # type: ignore[misc]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the JSON file's bytes, in hex."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """Largest id + 1, the size for an embedding table; a vocabulary may have holes."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def end_of_text(self) -> int | None:
        """Id of the token that ends a document, looked up by its usual names; None: the tokenizer has none."""
        ids = (self._tokenizer.token_to_id(name) for name in _END_OF_TEXT_NAMES)
        return next((i for i in ids if i is not None), None)

    @cached_property
    def ids(self) -> np.ndarray:
        """Ids that have a token, special ones among them, rising; int64."""
        return np.array(sorted(set(self._tokenizer.get_vocab(with_added_tokens=True).values())), dtype=np.int64)

    @cached_property
    def bos(self) -> int | None:
        """Id of the beginning-of-sequence token (BOS), added before texts or not; None: no such token is known."""
        if self._added_before:
            return self._added_before[-1]
        return None if self._bos is None else self._tokenizer.token_to_id(self._bos)

    @cached_property
    def before_text(self) -> list[int]:
        """Ids that come before a text, such as BOS; most often one or none.

        The JSON's post-processor adds them. If it adds none, ``add_bos_token`` of ``tokenizer_config.json`` adds BOS.
        So BOS comes once, whichever of the two asks for it. A false ``add_bos_token`` removes nothing, as in
        ``transformers`` 5.
        """
        if self._added_before or not self._add_bos or self.bos is None:
            return self._added_before
        return [self.bos]

    @cached_property
    def _added_before(self) -> list[int]:
        """Ids that the post-processor puts before a text."""
        encoded = self._tokenizer.encode("a", add_special_tokens=True)
        return encoded.ids[: next((i for i, special in enumerate(encoded.special_tokens_mask) if not special), 0)]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode each text to ids, uint32, in parallel over the texts."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode a sequence of ids to text; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        r"""Return one readable line per token: ``␣the``, ``\n``, ``\xe2`` for a byte that is no UTF-8 alone.

        An id without a token (padded vocabularies) reads ``[id]``.
        """
        return [self._token_text(int(i)) for i in ids]

    def _token_text(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return f"[{token_id}]"
        if token_id not in self._added and self._is_byte_level and all(ch in _BYTE_OF for ch in token):
            return _visible(bytes(_BYTE_OF[ch] for ch in token))
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # byte fallback of other families
            return _visible(bytes([int(token[3:5], 16)]))
        return _visible(token.replace("▁", " ").encode("utf-8"))

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        parts = json.loads(self._tokenizer.to_str())
        return '"ByteLevel"' in json.dumps([parts.get("pre_tokenizer"), parts.get("decoder")])


#: Characters or tokens that the steps of a tokenizer may write for one, in the worst case. The largest of published
#: ones are those with a table of sentencepiece, at some hundreds.
_MOST_GROWTH = 4096
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
#: A regex that is one class of characters, once or more: it matches no place between characters.
_CLASS = re.compile(r"\[\^?(?:[^\[\]\\&]|\\.)+\]\+?")
#: Characters that a step may write for one; a step that is not listed writes no more than it reads.
_GROWTH = {
    "ByteLevel": 4, "Metaspace": 2, "BertNormalizer": 3, "WordPiece": 2, "BPEDecoder": 2, "CTC": 2,
    "BertProcessing": 3, "RobertaProcessing": 4,
}  # fmt: skip


def _growth(content: str) -> float:
    """Bound the characters or tokens that a tokenizer writes for one: the product over its steps.

    Nine times ``"a"`` by 16 of them are 5 kB of JSON, and 16⁹ characters for an ``a``. The library loads the steps for
    this without the tokens, as it passes tokens through the normalizer when it loads them.

    Raises:
        Exception: ``content`` is no tokenizer.
    """
    whole = parse_json(content, unrepeated=True)
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    alone = Tokenizer.from_str(
        json.dumps({name: whole.get(name) for name in _STEPS} | {"version": "1.0", "model": model})
    )
    normalizer, pre_tokenizer, post_processor, decoder = (
        1.0 if (step := getattr(alone, name)) is None else _growth_of(json.loads(step.__getstate__()))
        for name in _STEPS
    )
    return max(normalizer * pre_tokenizer * post_processor, decoder)


def _growth_of_chain(steps: Sequence[dict[str, Any]]) -> float:
    """Bound the growth by steps behind one another: replacements of texts that hold nothing of what those before them
    write do not multiply.
    """
    total, group, written = 1.0, 1.0, set[str]()
    for step in steps:
        replaced = step["pattern"].get("String", "") if step["type"] == "Replace" else ""
        if not replaced or written & set(replaced):
            total, group, written = total * group, 1.0, set()
        group = max(group, _growth_of(step))
        if replaced:
            written |= set(step["content"])
        else:
            total, group = total * group, 1.0
    return total * group


def _growth_of(step: dict[str, Any]) -> float:
    """Bound the growth by a step, as the library writes it."""
    for parts in ("normalizers", "pretokenizers", "processors", "decoders"):
        if parts in step:
            return _growth_of_chain(step[parts])
    match step["type"]:
        case "Replace":
            written, replaced = len(step["content"]), len(step["pattern"].get("String", ""))
            if _CLASS.fullmatch(step["pattern"].get("Regex", "")):
                replaced = 1
            # Any other regex may match between all characters.
            return max(1.0, written / replaced) if replaced else 1.0 + written
        case "Prepend":
            return 1.0 + len(step["prepend"])
        case "Precompiled":
            table = base64.b64decode(step["precompiled_charsmap"])
            texts = table[4 + int.from_bytes(table[:4], "little") :].decode("utf-8", errors="replace")
            return max(1.0, *map(len, texts.split("\0")))
        case "TemplateProcessing":
            added = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
            sizes = [[added[one["SpecialToken"]["id"]] if "SpecialToken" in one else 1 for one in step[form]]
                     for form in ("single", "pair")]  # fmt: skip
            return max(1.0, *map(sum, sizes))
    return float(_GROWTH.get(step["type"], 1))


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE of ``vocab_size`` tokens: end of text, the 256 bytes, then merges by frequency.

    It has fewer if the texts hold too few different pairs. The same texts in the same order give the same tokenizer,
    byte for byte, for any larger ``vocab_size``.

    Raises:
        UsageError: ``vocab_size`` is below 257.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise UsageError(
            f"model.vocab_size: {vocab_size} is too small for data.tokenizer 'bpe'; give at least {_MIN_VOCAB_SIZE} "
            "(256 bytes and the end of text)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer.to_str(pretty=True).encode("utf-8"))


def _byte_of_character() -> dict[str, int]:
    """Map characters to the bytes that byte-level BPE spells with them: printable Latin-1 as itself, the rest from
    U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_of_character()
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": "\\\\", " ": "␣"}


def _visible(raw: bytes) -> str:
    out = []
    for char in raw.decode("utf-8", errors="surrogateescape"):
        code = ord(char)
        if 0xDC80 <= code <= 0xDCFF:  # where surrogateescape keeps a byte that did not decode
            out.append(f"\\x{code - 0xDC00:02x}")
        elif char in _ESCAPES or char.isprintable():
            out.append(_ESCAPES.get(char, char))
        else:
            out.append(f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}")
    return "".join(out)
