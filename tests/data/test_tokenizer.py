import base64
import json
import pickle
import random
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from birthmark.data.encode import Document, encode_documents, text_chunks
from birthmark.data.tokenizer import END_OF_TEXT, TextTokenizer, _growth_of, train_bpe
from birthmark.errors import RunError, UsageError

_WORDS = """the quick brown fox λ = σ 数据 🎈 def return self.value Wörterbuch interpretability initialisation
attention sink embedding"""


def words(seed, n):
    rng = random.Random(seed)
    vocabulary = _WORDS.split()
    return "".join(rng.choice(vocabulary) + rng.choice([" ", " ", "\n", "  ", "\n    "]) for _ in range(n))


TEXTS = [words(i, 400) for i in range(5)]
BPE = train_bpe(TEXTS, 320)

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(unicode_text)
def test_any_text_comes_back(text):
    (ids,) = BPE.encode([text])
    assert BPE.decode(ids.tolist()) == text


@pytest.mark.parametrize("vocab_size", [257, 258, 300, 320])
def test_exactly_as_many_tokens_as_asked(vocab_size):
    assert train_bpe(TEXTS, vocab_size).vocab_size == vocab_size


def test_merges_are_made_by_frequency():
    tokenizer = train_bpe(["ab ab ab ab ab cd cd"], 259)
    assert tokenizer.encode(["ab"])[0].tolist() == [257]
    assert tokenizer.token_texts([257, 258]) == ["ab", "␣ab"]


def test_a_corpus_too_small_for_the_vocabulary_gives_what_it_has():
    reached = train_bpe(["ab ab ab"], 1000)
    assert reached.vocab_size == 257 + 2  # ab and ␣ab
    # Asking for as many gives the same tokenizer: so a run that goes on finds it again.
    assert train_bpe(["ab ab ab"], 259).content == train_bpe(["ab ab ab"], 5000).content == reached.content


def test_vocabulary_below_the_bytes():
    with pytest.raises(UsageError, match="at least 257"):
        train_bpe(TEXTS, 256)


def test_names_of_special_tokens_in_text_are_text():
    text = f"a {END_OF_TEXT} b"
    (ids,) = BPE.encode([text])
    assert BPE.end_of_text not in ids
    assert BPE.decode(ids.tolist()) == text
    (ids,) = pickle.loads(pickle.dumps(BPE)).encode([text])
    assert BPE.end_of_text not in ids


def test_readable_tokens():
    def texts(text):
        return BPE.token_texts(BPE.encode([text])[0].tolist())

    assert texts("\n") == ["\\n"]
    assert texts("\t") == ["\\t"]
    assert texts("\\") == ["\\\\"]
    assert texts("\u0007") == ["\\u0007"]
    assert texts("🦖") == ["\\xf0", "\\x9f", "\\xa6", "\\x96"] or texts("🦖")[-1] == "\\x96"
    assert BPE.token_texts([0]) == [END_OF_TEXT]
    assert BPE.token_texts([320, 9999]) == ["[320]", "[9999]"]
    everything = BPE.token_texts(range(320))
    assert len(everything) == 320
    assert all(text and text.isprintable() and " " not in text for text in everything)


def test_unigram_tokenizer_of_another_family(tmp_path):
    other = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("<0x0A>", -3.0)], 0))
    other.pre_tokenizer = pre_tokenizers.Metaspace()
    other.decoder = decoders.Metaspace()
    other.add_special_tokens(["</s>"])
    path = tmp_path / "other.json"
    other.save(str(path))
    tokenizer = TextTokenizer.load(path)
    assert tokenizer.vocab_size == 5
    assert tokenizer.end_of_text == 1
    assert tokenizer.token_texts([2, 3, 4, 1]) == ["␣the", "␣", "\\n", "</s>"]


def test_vocabulary_with_holes():
    content = json.loads(BPE.content)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 500, "content": "<far>"})
    tokenizer, raw = TextTokenizer(json.dumps(content).encode()), Tokenizer.from_str(json.dumps(content))
    assert tokenizer.vocab_size >= 321
    assert tokenizer.token_texts([tokenizer.vocab_size - 1]) == ["<far>"]
    assert tokenizer.ids.tolist() == [i for i in range(1000) if raw.id_to_token(i) is not None]


def test_padding_truncation_and_templates_of_the_file_are_not_applied(tmp_path):
    raw = Tokenizer.from_str(BPE.content.decode())
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.post_processor = processors.TemplateProcessing(f"{END_OF_TEXT} $A", None, [(END_OF_TEXT, 0)])
    raw.save(str(tmp_path / "padded.json"))
    found = TextTokenizer.load(tmp_path / "padded.json").encode(["short", TEXTS[0]])
    assert all(np.array_equal(a, b) for a, b in zip(found, BPE.encode(["short", TEXTS[0]]), strict=True))


def test_no_end_of_text():
    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = TextTokenizer(plain.to_str().encode())
    assert tokenizer.end_of_text is None
    (encoded,) = encode_documents([Document("train", "a b b")], tokenizer)
    assert encoded.ids.tolist() == [0, 1, 1]


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"version": "1.0"}', b"\xff\xfe", BPE.content[:500]])
def test_damaged_json(tmp_path, content):
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"data\.tokenizer: .*damaged\.json' is not a tokenizers JSON file") as error:
        TextTokenizer.load(path)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"data\.tokenizer: .*missing; give .bpe. or"):
        TextTokenizer.load(tmp_path / "missing.json")


@pytest.mark.parametrize("limit", [300, 1000, 5000])
def test_chunks_that_end_at_lines_do_not_change_the_ids(limit):
    text = "\n".join(TEXTS) + "\n\n\n  x\n\ny\n" * 50
    parts = text_chunks(text, limit)
    assert len(parts) > 2
    assert np.array_equal(np.concatenate(BPE.encode(parts)), BPE.encode([text])[0])


def test_a_long_document_is_encoded_a_batch_at_a_time(monkeypatch):
    sizes, encode = [], TextTokenizer.encode

    def looked_at(tokenizer, texts):
        sizes.append(sum(map(len, texts)))
        return encode(tokenizer, texts)

    monkeypatch.setattr(TextTokenizer, "encode", looked_at)
    text = "\n".join(f"line {i}" for i in range(100_000))
    (found,) = encode_documents([Document("train", text)], BPE, batch_chars=1 << 18)
    assert max(sizes) <= 1 << 19
    assert len(sizes) >= 3
    assert found.ids.tolist() == [*Tokenizer.from_str(BPE.content.decode()).encode(text).ids, 0]


def test_wordpiece_trained_elsewhere(tmp_path):
    other = Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    other.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    other.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[EOS]"]))
    other.save(str(tmp_path / "wordpiece.json"))
    tokenizer = TextTokenizer.load(tmp_path / "wordpiece.json")
    assert tokenizer.vocab_size == other.get_vocab_size()
    assert tokenizer.end_of_text == 1
    assert tokenizer.encode(["the quick fox"])[0].tolist() == other.encode("the quick fox").ids


def _folder(folder, template, add_bos_token, bos_token="<s>"):
    """A model's tokenizer files: a byte-level BPE whose JSON puts ``template`` around a text."""
    content = json.loads(BPE.content)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 320, "content": "<s>"})
    raw = Tokenizer.from_str(json.dumps(content))
    if template is not None:
        specials = [("<s>", raw.token_to_id("<s>"))] if "<s>" in template else []
        raw.post_processor = processors.TemplateProcessing(template, None, specials)
    raw.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos_token, "add_bos_token": add_bos_token}
    written = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("bos_token", ["<s>", {"__type": "AddedToken", "content": "<s>", "special": True}])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
@pytest.mark.parametrize("template", [None, "$A", "<s> $A"])
def test_bos_comes_once_in_whatever_way_a_tokenizer_says_it(tmp_path, template, add_bos_token, bos_token):
    transformers = pytest.importorskip("transformers")
    tokenizer = TextTokenizer.load(_folder(tmp_path, template, add_bos_token, bos_token))
    # Version 5 reads the setting as an argument alone where there is a tokenizer.json; version 4 reads it in the file.
    more = {"add_bos_token": True} if add_bos_token else {}
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, **more)
    (ids,) = tokenizer.encode(["the quick"])
    assert [*tokenizer.before_text, *ids.tolist()] == theirs("the quick").input_ids
    assert tokenizer.before_text.count(tokenizer.bos) == (template == "<s> $A" or bool(add_bos_token))
    assert tokenizer.bos == theirs.bos_token_id
    again = pickle.loads(pickle.dumps(tokenizer))
    assert (again.before_text, again.bos) == (tokenizer.before_text, tokenizer.bos)
    given = TextTokenizer.of(theirs)
    assert (given.before_text, given.bos) == (tokenizer.before_text, tokenizer.bos)


def test_bos_that_is_no_token(tmp_path):
    with pytest.raises(UsageError, match=r"adds bos_token '<bos>', which is none of its tokens"):
        TextTokenizer.load(_folder(tmp_path, None, True, "<bos>"))
    assert TextTokenizer.load(_folder(tmp_path, None, False, "<bos>")).bos is None
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": "yes"}')
    with pytest.raises(RunError, match=r"tokenizer_config\.json: damaged \(add_bos_token"):
        TextTokenizer.load(tmp_path / "tokenizer.json")


def with_steps(**steps):
    """Return a tokenizer of 256 bytes with these steps, as JSON."""
    made = Tokenizer.from_str(BPE.content.decode())
    for name, step in steps.items():
        setattr(made, name, step)
    return made.to_str()


def chained(parts):
    return parts.Sequence([parts.Replace("a", 16 * "a")] * 9)


TEMPLATE = processors.TemplateProcessing(" ".join(["$A"] * 16), None, [])
BOMBS = {
    "normalizer": with_steps(normalizer=chained(normalizers)),
    "nested": with_steps(normalizer=normalizers.Sequence([normalizers.NFC(), chained(normalizers)])),
    "by turns": with_steps(
        normalizer=normalizers.Sequence([normalizers.Replace("a", 16 * "b"), normalizers.Replace("b", 16 * "a")] * 4)
    ),
    "prepend": with_steps(normalizer=normalizers.Sequence([normalizers.Prepend("aaa")] * 9)),
    "regex": with_steps(normalizer=normalizers.Sequence([normalizers.Replace(Regex("(?=a)"), "aa")] * 9)),
    "decoder": with_steps(decoder=chained(decoders)),
    "bytes": with_steps(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 30)),
    "template": with_steps(post_processor=processors.Sequence([TEMPLATE] * 9)),
    # The library takes the first, other readers the second.
    "twice": with_steps(normalizer=chained(normalizers)).replace('"normalizer":', '"normalizer":null,"normalizer":'),
    # The library's former form.
    "untyped": with_steps(normalizer=chained(normalizers)).replace('"type":"Replace",', ""),
}


@pytest.mark.parametrize("name", BOMBS)
def test_steps_that_would_fill_the_memory_are_refused_before_they_run(name):
    with pytest.raises(
        UsageError, match=r"^data.tokenizer: 'tokenizer.json' (may write|.* the key 'normalizer' twice)"
    ):
        TextTokenizer(BOMBS[name].encode())


def table_of_sentencepiece(*texts):
    return b"\0\0\0\0" + b"".join(text.encode() + b"\0" for text in texts)


USUAL = {
    "LLaMA 2": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        "post_processor": processors.TemplateProcessing("<|endoftext|> $A", None, [(END_OF_TEXT, 0)]),
        "decoder": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    },
    "Gemma 3": {
        "normalizer": normalizers.Replace(" ", "▁"),
        "pre_tokenizer": pre_tokenizers.Split(" ", "merged_with_previous"),
        "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    },
    "SmolLM2": {
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
        "decoder": decoders.ByteLevel(),
    },
    "Llama 3": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.ByteLevel(False)]
        ),
        "post_processor": processors.Sequence(
            [processors.ByteLevel(), processors.TemplateProcessing("<|endoftext|> $A", None, [(END_OF_TEXT, 0)])]
        ),
    },
    "ALBERT": {
        "normalizer": normalizers.Sequence(
            [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(),
             normalizers.Replace(Regex(" {2,}"), " ")]
        ),
        "pre_tokenizer": pre_tokenizers.Metaspace(),
        "post_processor": processors.TemplateProcessing(
            "<|endoftext|> $A <|endoftext|>", "$A <|endoftext|> <|endoftext|> $B", [(END_OF_TEXT, 0)]
        ),
        "decoder": decoders.Metaspace(),
    },
    "marks of case": {
        "normalizer": normalizers.Sequence([normalizers.Replace(c, f"^{c.lower()}") for c in string.ascii_uppercase])
    },
    "one dash": {
        "normalizer": normalizers.Sequence([normalizers.Replace(Regex(f"[–—{c}]"), "-") for c in "‐‑‒―−﹣－~∼⁓〜⸺"])
    },
    "BERT": {
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "post_processor": processors.BertProcessing((END_OF_TEXT, 0), (END_OF_TEXT, 0)),
        "decoder": decoders.WordPiece(),
    },
}  # fmt: skip


@pytest.mark.parametrize("family", USUAL)
def test_steps_of_published_tokenizers_pass(family):
    content = with_steps(**USUAL[family])
    text = "the quick brown fox"
    (found,) = TextTokenizer(content.encode()).encode([text])
    assert found.tolist() == Tokenizer.from_str(content).encode(text, add_special_tokens=False).ids


def test_a_table_of_sentencepiece_grows_by_its_longest_text():
    """U+FDFA becomes 18 characters in that of T5 and XLM-R."""
    step = {"type": "Precompiled"}
    for longest, grows in (("صلى الله عليه وسلم", 18), (5000 * "a", 5000)):
        table = base64.b64encode(table_of_sentencepiece("a", longest, "bc")).decode()
        assert _growth_of({**step, "precompiled_charsmap": table}) == grows
