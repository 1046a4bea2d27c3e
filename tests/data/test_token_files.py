"""Tokens that exist: formats are written here by hand from their published layouts, and read as a run does."""

import json
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from birthmark.data import stored_files
from birthmark.data import token_file_formats as formats
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.prepare import prepare
from birthmark.data.suffixes import TOKEN_FILES, TokenFiles
from birthmark.data.tokenizer import TextTokenizer
from birthmark.errors import RunError, UsageError

SEQ_LEN, VOCAB, END = 8, 320, 0
RNG = np.random.default_rng(7)
#: Sixty documents of 1 to 40 tokens, each with the end token behind it.
DOCUMENTS = [[*RNG.integers(1, 300, size=n).tolist(), END] for n in RNG.integers(1, 40, size=60)]
FLAT = [token for document in DOCUMENTS for token in document]


def raw(path, tokens, kind="H"):
    path.write_bytes(struct.pack(f"<{len(tokens)}{kind}", *tokens))
    return path


def llm_c(path, tokens, magic=20240520, version=1, kind="H"):
    header = struct.pack("<256i", magic, version, len(tokens), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}{kind}", *tokens))
    return path


def megatron(path, documents):
    """Tokens of 2 bytes; each document is a sequence of its own."""
    lengths = [len(document) for document in documents]
    pointers = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    path.write_bytes(b"".join(struct.pack(f"<{len(d)}H", *d) for d in documents))
    n = len(lengths)
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, n, n + 1)
    arrays = struct.pack(f"<{n}i{n}q", *lengths, *pointers) + struct.pack(f"<{n + 1}q", *range(n + 1))
    path.with_suffix(".idx").write_bytes(head + arrays)
    return path


def litdata(folder, documents):
    """Two chunks; int32, as litgpt writes them."""
    folder.mkdir()
    chunks = []
    for number, part in enumerate((documents[:25], documents[25:])):
        n, tokens = len(part), [token for document in part for token in document]
        offsets, at = [], 4 * (n + 2)
        for document in part:
            offsets.append(at)
            at += 4 * len(document)
        name = f"chunk-0-{number}.bin"
        content = struct.pack(f"<{n + 2}I", n, *offsets, at) + struct.pack(f"<{len(tokens)}i", *tokens)
        (folder / name).write_bytes(content)
        chunks.append({"chunk_bytes": len(content), "chunk_size": n, "filename": name, "dim": len(tokens)})
    config = {
        "compression": None,
        "chunk_size": None,
        "chunk_bytes": 1 << 26,
        "data_format": ["no_header_tensor:16"],
        "data_spec": '[1, {"type": null}]',
        "encryption": None,
        "item_loader": "TokensLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return folder


def datatrove(path, documents):
    """Tokens of 2 bytes, the ends of the documents, and the metadata of a last file."""
    ends = np.cumsum([len(document) for document in documents]).tolist()
    raw(path, [token for document in documents for token in document])
    path.with_name(f"{path.name}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    path.with_name(f"{path.name}.metadata").write_text(f"gpt2|2\n{ends[-1]}\n{ends[-1]} T")
    return path


def mds(folder, samples, encoding="", name="tokens"):
    """Two shards ``[n, length]``, as mosaicml-streaming's MDSWriter lays them out."""
    folder.mkdir(parents=True)
    encoding = encoding or f"ndarray:{samples.dtype.name}:{samples.shape[1]}"
    columns = {"column_encodings": [encoding], "column_names": [name], "column_sizes": [samples[0].nbytes]}
    common = {"compression": None, "format": "mds", "hashes": [], "size_limit": 1 << 26, "version": 2}
    shards = []
    for number, part in enumerate((samples[:3], samples[3:])):
        said = json.dumps(common | columns, sort_keys=True).encode()
        first = 4 * (len(part) + 2) + len(said)
        offsets = [first + i * samples[0].nbytes for i in range(len(part) + 1)]
        content = struct.pack(f"<{len(part) + 2}I", len(part), *offsets) + said + part.tobytes()
        basename = f"shard.{number:05d}.mds"
        (folder / basename).write_bytes(content)
        held = {"basename": basename, "bytes": len(content), "hashes": {}}
        shards.append(common | columns | {"raw_data": held, "samples": len(part), "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def write(name, folder):
    """A format's files, and the fields that a config needs for them."""
    match name:
        case "nanoGPT":
            return {"path": str(raw(folder / "a.bin", FLAT)), "token_dtype": "uint16"}
        case "OLMo":
            return {"path": str(raw(folder / "part-0-00000.npy", FLAT, "I")), "token_dtype": "uint32"}
        case "numpy":
            np.save(folder / "a.npy", np.array(FLAT, dtype=np.uint16))
            return {"path": str(folder / "a.npy")}
        case "llm.c, GPT-2":
            return {"path": str(llm_c(folder / "a.bin", FLAT))}
        case "llm.c, Llama 3":
            return {"path": str(llm_c(folder / "a.bin", FLAT, 20240801, 7, "I"))}
        case "Megatron-LM":
            return {"path": str(megatron(folder / "a_text_document.bin", DOCUMENTS))}
        case "litdata":
            return {"path": str(litdata(folder / "train", DOCUMENTS))}
        case "datatrove":
            return {"path": str(datatrove(folder / "00000_shuffled.ds", DOCUMENTS))}
        case "MDS":
            return {"path": str(mds(folder / "train", np.array(FLAT[:1000], dtype="<i4").reshape(10, 100)))}
    raise AssertionError(name)


RAW = ("nanoGPT", "OLMo", "numpy", "llm.c, GPT-2", "llm.c, Llama 3")
WITH_DOCUMENTS = ("Megatron-LM", "litdata", "datatrove")


@pytest.fixture
def config(tmp_path):
    def make(**fields):
        return DataConfig(**({"val_fraction": 0.2, "cache_dir": str(tmp_path / "cache")} | fields))

    return make


def stream(data, split):
    """All tokens of a split, through the class that gives its batches."""
    tokens = getattr(data, split).tokens
    return tokens.read(np.array([0]), len(tokens))[0].tolist()


def documents_of(tokens):
    found = [[]]
    for token in tokens:
        found[-1].append(token)
        if token == END:
            found.append([])
    assert found.pop() == []
    return found


@pytest.mark.parametrize("name", RAW)
def test_without_documents_validation_has_the_end(name, config, tmp_path):
    data = prepare(config(**write(name, tmp_path)), vocab_size=VOCAB, seq_len=SEQ_LEN)
    boundary = round(len(FLAT) * 0.8)
    assert stream(data, "train") == FLAT[:boundary]
    assert stream(data, "val") == FLAT[boundary:]
    assert data.record["split"] == "end of each file"
    assert (data.vocab_size, data.tokenizer_path, data.bytes_per_token) == (VOCAB, None, None)
    assert data.token_texts([3, 300]) == ["[3]", "[300]"]


@pytest.mark.parametrize("name", [*RAW, *WITH_DOCUMENTS])
def test_documents_stay_whole(name, config, tmp_path):
    asked = config(**write(name, tmp_path), end_token=END if name in RAW else None)
    data = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
    train, val = (documents_of(stream(data, split)) for split in ("train", "val"))
    assert sorted(train + val) == sorted(DOCUMENTS)
    # In the order of the file, each in one split.
    places = [[DOCUMENTS.index(document) for document in documents] for documents in (train, val)]
    assert all(found == sorted(found) for found in places)
    assert data.record["documents"] == {"train": len(train), "val": len(val)}
    assert 3 <= len(val) <= 25
    assert data.record["split"] == "documents"
    json.dumps(data.record, allow_nan=False)
    # Samples are windows of the stream, each once per epoch.
    flat, n = stream(data, "train"), data.train.n_samples
    expected = [flat[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(n)]
    assert sorted(data.train.batch(0, n).tolist()) == sorted(expected)
    again = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert again.record == data.record
    assert stream(again, "val") == stream(data, "val")
    worker = pickle.loads(pickle.dumps(data.train))
    assert worker.batch(0, 5).tolist() == data.train.batch(0, 5).tolist()


@pytest.mark.parametrize("name", [*WITH_DOCUMENTS, "MDS"])
@pytest.mark.parametrize("packing", ["concat", "documents", "best_fit"])
def test_an_index_says_where_documents_without_an_end_token_begin(name, packing, config, tmp_path):
    bare = [document[:-1] for document in DOCUMENTS if len(document) > 2]
    if name == "MDS":
        bare = np.array(FLAT, dtype="<i4")[:1000].reshape(50, 20).clip(1).tolist()
    format_of = {"Megatron-LM": megatron, "litdata": litdata, "datatrove": datatrove, "MDS": mds}[name]
    held = np.array(bare, dtype="<i4") if name == "MDS" else bare
    path = str(format_of(tmp_path / {"Megatron-LM": "a.bin", "datatrove": "a.ds"}.get(name, "train"), held))
    data = prepare(config(path=path, packing=packing, bos="document", end_token=END), vocab_size=VOCAB, seq_len=48)
    found = []
    for source in (data.train, data.val):
        rows = source.cut.read(np.arange(source.n_samples))
        # Sequences of one text share a token with the next.
        tokens = [token for row in rows.tolist() for token in row[: 48 if packing == "concat" else None]]
        text = "".join(f"{token} " for token in tokens if token >= 0)
        documents = [[int(token) for token in part.split()] for part in f" {text}".split(f" {END} ")]
        assert documents.pop(0) == []
        found += documents
    whole = sum(document in found for document in bare)
    assert whole == len(bare) if packing != "concat" else whole >= len(bare) - 4
    assert all(document in bare for document in found) or packing == "concat"
    # The ids have no token that ends a document: the model cannot tell documents apart, and a run that asks is refused.
    assert data.borders is None
    if packing != "concat":
        plain = prepare(config(path=path, packing=packing), vocab_size=VOCAB, seq_len=48)
        starts = {document[0] for document in bare}
        assert all(int(row[0]) in starts for row in plain.train.batch(0, plain.train.n_samples))


def test_end_tokens_of_long_documents_are_seen_and_a_file_without_an_index_is_one_document(config, tmp_path):
    long = [[1 + number, *[7] * 400_000, END] for number in range(8)]
    indexed, plain = datatrove(tmp_path / "a.ds", long), raw(tmp_path / "b.ds", DOCUMENTS[0])
    settings = {"path": str(indexed), "end_token": END, "bos": "document"}
    data = prepare(config(**settings), vocab_size=VOCAB, seq_len=48)
    assert data.borders is not None
    # Beside it lies a file of tokens alone, and the index counts all the same.
    bare = datatrove(tmp_path / "c.ds", [[1 + number, *[7] * 99] for number in range(20)])
    files = config(path=[str(bare), str(plain)], token_dtype="uint16", packing="documents", val_path=str(indexed))
    rows = prepare(files, vocab_size=VOCAB, seq_len=100).train
    firsts = [int(row[0]) for row in rows.batch(0, rows.n_samples)]
    assert {*range(1, 21)} <= {*firsts}


@pytest.mark.parametrize("name", [*RAW, *WITH_DOCUMENTS, "MDS"])
def test_a_store_gives_the_tokens_of_the_disk(name, config, tmp_path, monkeypatch):
    """In blocks of 64 bytes, so that each format's files take many."""
    monkeypatch.setattr(stored_files, "BLOCK_BYTES", 64)
    (tmp_path / "files").mkdir()
    fields = write(name, tmp_path / "files")
    here = prepare(config(**fields), vocab_size=VOCAB, seq_len=SEQ_LEN)
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "files"), "/held", recursive=True)
    try:
        url = f"memory://held{fields['path'].removeprefix(str(tmp_path / 'files'))}"
        asked = config(**fields | {"path": url, "cache_gb": 0.001, "verify": "size"})
        there = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
        for split in ("train", "val"):
            assert stream(there, split) == stream(here, split)
        assert there.record["tokens"] == here.record["tokens"]
        assert (Path(asked.cache_dir) / "stored-blocks").stat().st_size > 0
    finally:
        store.rm("/held", recursive=True)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_samples_of_mds_are_documents(dtype, config, tmp_path):
    samples = np.arange(1, 7 * 20 + 1, dtype=dtype).reshape(7, 20)
    data = prepare(config(path=str(mds(tmp_path / "train", samples))), vocab_size=VOCAB, seq_len=SEQ_LEN)
    found = [np.reshape(stream(data, split), (-1, 20)).tolist() for split in ("train", "val")]
    assert sorted(found[0] + found[1]) == samples.tolist()
    assert all(part == sorted(part) and part for part in found)


@pytest.mark.parametrize(
    ("name", "write"), [("MDS", lambda folder: mds(folder, np.ones((7, 20), np.int32))), ("litdata", litdata)]
)
def test_a_folder_of_sets_is_refused(name, write, config, tmp_path):
    for part in ("train", "val"):
        write(tmp_path / part, *[DOCUMENTS] * (name == "litdata"))
    with pytest.raises(UsageError, match=rf"holds the {name} sets train, val; name one as data\.path"):
        prepare(config(path=str(tmp_path), token_dtype="int32"), vocab_size=VOCAB, seq_len=SEQ_LEN)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_format_is_its_two_rows(is_folder, config, tmp_path, monkeypatch):
    """Files of ``.tok`` with ``.tok.ends``: accepted, found in a folder, fetched with theirs, and read in blocks."""

    def recognises(path):
        return not is_folder or (path / "a.tok").is_file()

    def read(key, path, token_dtype):
        file = path / "a.tok" if is_folder else path
        assert file.with_name("a.tok.ends").is_file()
        return [formats.TokenFile(key, file, "<u2", len(FLAT))]

    monkeypatch.setitem(TOKEN_FILES, "new", TokenFiles((".tok",), (".tok.ends",), is_folder))
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, formats.TokenFormat("new", recognises, read)))
    folder = tmp_path / "there"
    folder.mkdir()
    raw(folder / "a.tok", FLAT)
    (folder / "a.tok.ends").touch()
    store = fsspec.filesystem("memory")
    store.put(f"{folder}/", "/new/", recursive=True)
    paths = [folder, *([] if is_folder else [folder / "a.tok"])]
    urls = ["memory://new/", *([] if is_folder else ["memory://new/a.tok"])]
    try:
        for path in map(str, [*paths, *urls]):
            for fields in ({}, {"cache_gb": 0.01, "verify": "size"} if path in urls else {}):
                asked = config(path=path, **fields)
                assert asked.problems() == []
                data = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
                assert stream(data, "train") + stream(data, "val") == FLAT
        assert (Path(asked.cache_dir) / "stored-blocks").stat().st_size > 0
    finally:
        store.rm("/new", recursive=True)


@pytest.mark.parametrize(
    ("encoding", "name", "expected"),
    [
        ("bytes", "tokens", r"column tokens \(bytes\) has samples of no fixed number of tokens; write its"),
        ("ndarray:int32", "tokens", "has samples of no fixed number of tokens"),
        ("str", "text", "has samples of no fixed number of tokens"),
        ("ndarray:int32:0", "tokens", "has samples of no fixed number of tokens"),
        (f"ndarray:int32:{'9' * 5000}", "tokens", "has samples of no fixed number of tokens"),
        ("ndarray:int32:21", "tokens", "cut short or damaged: it is not 3 samples of 21 tokens"),
    ],
)
def test_other_mds_is_refused_by_name(encoding, name, expected, config, tmp_path):
    folder = mds(tmp_path / "set", np.zeros((7, 20), dtype=np.int32), encoding, name)
    with pytest.raises(UsageError, match=expected):
        prepare(config(path=str(folder)), vocab_size=VOCAB, seq_len=SEQ_LEN)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("a.ds", b"123", "cut short: 1 bytes are left"),
        ("a.ds.index", b"123", "cut short: 3 bytes are no ends"),
        ("a.ds.index", struct.pack("<2Q", 9, 4), "lies: its documents do not ascend"),
        ("a.ds.metadata", b"gpt2\n", "damaged \\(its first line does not end with"),
    ],
)
def test_damage_of_datatrove_is_one_line(file, content, expected, config, tmp_path):
    path = datatrove(tmp_path / "a.ds", DOCUMENTS)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UsageError, match=expected):
        prepare(config(path=str(path)), vocab_size=VOCAB, seq_len=SEQ_LEN)


def test_the_split_does_not_depend_on_how_a_file_is_read(config, tmp_path, monkeypatch):
    fields = write("nanoGPT", tmp_path) | {"end_token": END}
    whole = prepare(config(**fields), vocab_size=VOCAB, seq_len=SEQ_LEN)
    monkeypatch.setattr("birthmark.data.token_file_splits.BLOCK", 7)
    monkeypatch.setattr("birthmark.data.token_file_splits._DOCUMENTS", 3)
    by_piece = prepare(config(**fields, cache_dir=str(tmp_path / "other")), vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert by_piece.record == whole.record
    assert stream(by_piece, "val") == stream(whole, "val")


@pytest.mark.parametrize("val_fraction", [1e-9, 1 - 1e-9])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_documents_give_two_splits(n, val_fraction, config, tmp_path):
    documents = [[*range(1, 40 + i), END] for i in range(n)]
    megatron(tmp_path / "a.bin", documents)
    asked = config(path=str(tmp_path / "a.idx"), val_fraction=val_fraction if n > 1 else 0.3)
    data = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
    train, val = stream(data, "train"), stream(data, "val")
    assert sorted(train + val) == sorted(token for document in documents for token in document)
    if n > 1:
        last = documents[-1]
        assert (val if val_fraction < 0.5 else train) == last


def test_validation_files_are_not_trained_on(config, tmp_path):
    """nanoGPT's own layout: both files are in the folder that is named."""
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    train, val = raw(tokens / "train.bin", FLAT[:500]), raw(tokens / "val.bin", FLAT[500:])
    (tmp_path / "link.bin").symlink_to(val)
    for named in (val, tmp_path / "link.bin"):
        asked = config(path=str(tokens), val_path=[str(named), str(val)], token_dtype="uint16")
        data = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
        assert stream(data, "train") == FLAT[:500]
        assert stream(data, "val") == FLAT[500:]
        assert data.record["split"] == "files of data.val_path"
    packed = prepare(replace(asked, end_token=END, packing="documents"), vocab_size=VOCAB, seq_len=40)
    rows = packed.train.cut.read(np.arange(packed.train.n_samples))
    assert all(row[row >= 0][-1] == END for row in rows[:-1])
    alone = prepare(replace(asked, path=str(train)), vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert data.record | {"path": str(train)} == alone.record
    with pytest.raises(UsageError, match=r"^data\.path: .* no files but those of data\.val_path; name files to train"):
        prepare(replace(asked, val_path=str(tokens)), vocab_size=VOCAB, seq_len=SEQ_LEN)


def test_files_that_are_named_twice_are_read_once(config, tmp_path):
    train = raw(tmp_path / "train.bin", FLAT)
    once = config(path=str(train), token_dtype="uint16")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "link.bin").symlink_to(train)
    expected = prepare(once, vocab_size=VOCAB, seq_len=SEQ_LEN).record
    for paths in ([train, train], [train, tmp_path / "tokens"]):
        asked = replace(once, path=[str(path) for path in paths])
        found = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN).record
        assert found | {"path": str(train)} == expected
    megatron(tmp_path / "m.bin", DOCUMENTS)
    asked = config(path=[str(tmp_path / "m.bin"), str(tmp_path / "m.idx")])
    assert sum(prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN).record["tokens"].values()) == len(FLAT)


def test_several_files_are_one_corpus(config, tmp_path):
    folder = tmp_path / "tokens"
    (folder / "b").mkdir(parents=True)
    for name, tokens in (("a.bin", FLAT[:300]), ("b/a.bin", FLAT[300:600]), ("c.bin", [])):
        raw(folder / name, tokens)
    data = prepare(config(path=str(folder), token_dtype="uint16"), vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert stream(data, "train") == [*FLAT[:240], *FLAT[300:540]]
    assert stream(data, "val") == [*FLAT[240:300], *FLAT[540:600]]


def test_our_shards_are_a_source(config, folder, tokenizer, tmp_path):
    (tmp_path / "t.json").write_bytes(tokenizer.content)
    text = config(path=str(folder), tokenizer=str(tmp_path / "t.json"))
    of_text = prepare(text, vocab_size=VOCAB, seq_len=SEQ_LEN)
    shards = next(Path(text.cache_dir).glob("shards-*[0-9a-f]")).rename(tmp_path / "shards")
    for named in (str(tmp_path / "t.json"), "bpe"):
        asked = replace(text, path=str(shards), tokenizer=named)
        data = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
        assert data.train.batch(0, 50).tolist() == of_text.train.batch(0, 50).tolist()
        assert data.val.batch(0, 9).tolist() == of_text.val.batch(0, 9).tolist()
        same = ("content_hash", "tokens", "documents", "bytes", "unigram_entropy", "tokenizer_hash", "vocab_size")
        assert [data.record[key] for key in same] == [of_text.record[key] for key in same]
    other = TextTokenizer(tokenizer.content + b" ")
    (tmp_path / "other.json").write_bytes(other.content)
    with pytest.raises(
        UsageError,
        match=r"^data\.tokenizer: .*other\.json is not the tokenizer of .*give the tokenizer that made them$",
    ):
        prepare(replace(text, path=str(shards), tokenizer=str(tmp_path / "other.json")), vocab_size=VOCAB, seq_len=8)
    with pytest.raises(UsageError, match=r"^data\.end_token: not read of .*leave the field out$"):
        prepare(replace(text, path=str(shards), end_token=0), vocab_size=VOCAB, seq_len=SEQ_LEN)
    with (shards / "train-00000.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(RunError, match=r"train-00000\.bin: damaged .*copy the folder again") as error:
        prepare(replace(text, path=str(shards)), vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert "delete" not in str(error.value)  # they are the user's own


def test_a_mixture_of_text_and_tokens(config, folder, tokenizer, tmp_path):
    (tmp_path / "t.json").write_bytes(tokenizer.content)
    sources = [
        SourceConfig(str(folder), 1.0, "text"),
        SourceConfig(**write("Megatron-LM", tmp_path), weight=1.0, name="tokens"),
    ]
    asked = config(sources=sources, tokenizer=str(tmp_path / "t.json"))
    data = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
    alone = prepare(asked.each()["tokens"], vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert data.train.sources["tokens"].batch(0, 9).tolist() == alone.train.batch(0, 9).tolist()
    assert data.record["bytes_per_token"] is None
    with pytest.raises(UsageError, match=r"^data\.tokenizer: 'bpe' would train one, but source 'tokens' is tokens"):
        prepare(replace(asked, tokenizer="bpe"), vocab_size=VOCAB, seq_len=SEQ_LEN)


def test_frequencies_are_those_of_the_tokens(config, tmp_path):
    data = prepare(config(**write("nanoGPT", tmp_path)), vocab_size=VOCAB, seq_len=SEQ_LEN)
    train, val = (np.bincount(stream(data, split), minlength=VOCAB) for split in ("train", "val"))
    p = (train + 1) / (train + 1).sum()
    assert data.record["unigram_entropy"] == pytest.approx(-(val / val.sum() * np.log(p)).sum(), rel=1e-12)


def read_all(config):
    data = prepare(config, vocab_size=VOCAB, seq_len=SEQ_LEN)
    data.train.batch(0, data.train.n_samples or 0)


@pytest.mark.parametrize("verify", ["checksum", "size"])
def test_a_token_beyond_the_vocabulary(verify, config, tmp_path):
    tokens = [*FLAT[:400], 999, *FLAT[400:]]
    path = raw(tmp_path / "a.bin", tokens)
    asked = config(path=str(path), token_dtype="uint16", verify=verify)
    with pytest.raises(RunError, match=r"a\.bin: holds token 999, the vocabulary has 320; give the tokenizer"):
        read_all(asked)
    assert prepare(asked, vocab_size=1000, seq_len=SEQ_LEN).vocab_size == 1000
    negative = raw(tmp_path / "b.bin", [*FLAT[:400], -1, *FLAT[400:]], "i")
    with pytest.raises(RunError, match=r"b\.bin: holds token -1, the vocabulary has 320"):
        read_all(replace(asked, path=str(negative), token_dtype="int32"))


def cut(path, n):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - n)


def patch(path, at, content):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def exchange(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def np_header(path, length):
    said = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({length},), }}".encode()
    path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(said)) + said + bytes(8))


IDX_LENGTHS, IDX_POINTERS = 34, 34 + 4 * len(DOCUMENTS)
IDX_DOCUMENTS = IDX_POINTERS + 8 * len(DOCUMENTS)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("nanoGPT", lambda f: cut(f / "a.bin", 1), r"a\.bin: cut short, or no uint16: 1 bytes are left"),
        ("OLMo", lambda f: cut(f / "part-0-00000.npy", 2), r"00000\.npy: cut short, or no uint32: 2 bytes are left"),
        ("numpy", lambda f: cut(f / "a.npy", 2), r"a\.npy: cut short: its header promises"),
        ("numpy", lambda f: patch(f / "a.npy", 12, b"????"), r"a\.npy: damaged \(its numpy header"),
        *(
            (
                "numpy",
                lambda f, said=said: np_header(f / "a.npy", said),
                r"a\.npy: damaged \(the length in its numpy header is no number of tokens\); write it again$",
            )
            for said in ("None", "'a'", "1e999", "2.5", "-1", "True", f"0x{'f' * 5000}")
        ),
        (
            "numpy",
            lambda f: np.save(f / "a.npy", np.zeros((4, 4))),
            r"a\.npy: holds <f8 in 2 dimensions, not a",
        ),
        (
            "numpy",
            lambda f: np.save(f / "a.npy", np.zeros(4, ">u2")),
            r"a\.npy: holds >u2 in 1 dimensions, not a",
        ),
        ("llm.c, GPT-2", lambda f: cut(f / "a.bin", 2), r"a\.bin: cut short: \d+ tokens are promised"),
        ("llm.c, GPT-2", lambda f: patch(f / "a.bin", 4, b"\2"), r"a\.bin: is of version 2 of llm\.c's format"),
        ("Megatron-LM", lambda f: cut(f / "a_text_document.bin", 2), r"a_text_document\.idx: lies: it has"),
        ("Megatron-LM", lambda f: cut(f / "a_text_document.bin", 1), r"a_text_document\.bin: cut short: 1 bytes"),
        ("Megatron-LM", lambda f: (f / "a_text_document.bin").unlink(), r"does not exist|missing beside"),
        ("Megatron-LM", lambda f: cut(f / "a_text_document.idx", 8), r"idx: damaged \(60 sequences and 61 document"),
        ("Megatron-LM", lambda f: patch(f / "a_text_document.idx", 0, b"X"), r"idx: is no index of Megatron-LM"),
        ("Megatron-LM", lambda f: patch(f / "a_text_document.idx", 9, b"\2"), r"idx: is of version 2 of Megatron"),
        ("Megatron-LM", lambda f: patch(f / "a_text_document.idx", 17, b"\7"), r"idx: damaged \(dtype code 7"),
        ("Megatron-LM", lambda f: patch(f / "a_text_document.idx", 18, b"\xff" * 7), r"idx: damaged \(7205759403"),
        (
            "Megatron-LM",
            lambda f: patch(f / "a_text_document.idx", IDX_LENGTHS + 4, struct.pack("<i", -3)),
            r"idx: damaged \(sequence 1 has a negative length\)",
        ),
        (
            "Megatron-LM",
            lambda f: patch(f / "a_text_document.idx", IDX_POINTERS + 16, struct.pack("<q", 10**9)),
            r"idx: lies: sequence 2 begins at byte 1000000000 by its pointer",
        ),
        (
            "Megatron-LM",
            lambda f: patch(f / "a_text_document.idx", IDX_DOCUMENTS + 8, struct.pack("<q", 50)),
            r"idx: damaged \(documents do not begin at sequence 0, ascend",
        ),
        ("litdata", lambda f: cut(f / "train/chunk-0-1.bin", 4), r"chunk-0-1\.bin: cut short: 35 items of"),
        ("litdata", lambda f: (f / "train/chunk-0-1.bin").unlink(), r"chunk-0-1\.bin: missing"),
        ("litdata", lambda f: patch(f / "train/chunk-0-0.bin", 8, b"\xff" * 4), r"chunk-0-0\.bin: damaged \(its table"),
        ("litdata", lambda f: cut(f / "train/index.json", 9), r"index\.json: damaged JSON"),
        (
            "litdata",
            lambda f: exchange(f / "train/index.json", "no_header_tensor:16", "jpeg"),
            "its items are jpeg, not",
        ),
    ],
)
def test_a_damaged_file_is_one_line(name, damage, message, config, tmp_path):
    fields = write(name, tmp_path)
    damage(tmp_path)
    with pytest.raises((UsageError, RunError), match=message) as error:
        prepare(config(**fields), vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert "\n" not in str(error.value)
    # Nothing half written: the mended file is read.
    shutil.rmtree(tmp_path / "train", ignore_errors=True)
    prepare(config(**write(name, tmp_path)), vocab_size=VOCAB, seq_len=SEQ_LEN)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("nanoGPT", {"token_dtype": ""}, r"^data\.token_dtype: .*a\.bin does not say how its tokens are stored"),
        ("OLMo", {"token_dtype": ""}, r"^data\.token_dtype: .*00000\.npy does not say"),
        ("llm.c, GPT-2", {"token_dtype": "int32"}, r"^data\.token_dtype: int32 is given, but .*a\.bin says uint16"),
        ("Megatron-LM", {"token_dtype": "int32"}, r"^data\.token_dtype: int32 is given, but .*\.idx says uint16"),
        ("Megatron-LM", {"bos": "sequence"}, r"^data\.bos sequence: data\.tokenizer has neither .*data\.end_token"),
        ("nanoGPT", {"bos": "document"}, r"^data\.bos document: data\.tokenizer has no end-of-text .*data\.end_token"),
        ("nanoGPT", {"end_token": VOCAB}, r"^data\.end_token: there is no token 320: the vocabulary has 320$"),
        ("nanoGPT", {"end_token": -1}, r"^data\.end_token: -1 is no token"),
        ("nanoGPT", {"val_path": "/no/where.bin"}, r"^data\.val_path: '/no/where\.bin' does not exist"),
        ("nanoGPT", {"val_path": []}, r"^data\.val_path: empty"),
        ("nanoGPT", {"val_path": __file__}, r"^data\.val_path: .*\.py' holds no \.bin/\.npy/\.idx/\.ds files"),
    ],
)
def test_fields_that_do_not_fit(name, fields, message, config, tmp_path):
    with pytest.raises(UsageError, match=message) as error:
        prepare(config(**(write(name, tmp_path) | fields)), vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert "\n" not in str(error.value)


def test_fields_of_tokens_are_not_read_of_text(config, folder):
    for fields in ({"token_dtype": "uint16"}, {"end_token": 0}, {"val_path": str(folder)}):
        with pytest.raises(UsageError, match=rf"^data\.{next(iter(fields))}: read of token files only"):
            prepare(config(path=str(folder), **fields), vocab_size=VOCAB, seq_len=SEQ_LEN)
