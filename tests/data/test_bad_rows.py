"""Damaged rows end the run with file and line, or are left out and counted."""

import json

import pandas
import pytest

from birthmark.data.shards import build_shards
from birthmark.errors import UsageError

ROWS = [f"row {i}, with words\nand a second line" for i in range(30)]


def lines(path, damaged):
    rows = [json.dumps({"id": i, "text": row}).encode() for i, row in enumerate(ROWS)]
    path.write_bytes(b"".join(damaged.get(i, row) + b"\n" for i, row in enumerate(rows)))
    return path


def cells(path, damaged):
    rows = [f'{i},"{row}"'.encode() for i, row in enumerate(ROWS)]
    path.write_bytes(b"id,text\n" + b"".join(damaged.get(i, row) + b"\n" for i, row in enumerate(rows)))
    return path


def texts(corpus):
    return [document.text for document in corpus.documents()]


BAD_LINES = {
    0: (b"17", r"is no JSON object but int"),
    4: (b'{"id": 4, "text": "cut', r"is no JSON \("),
    9: (b'{"id": 9, "text": "\xff\xfe"}', r"is not UTF-8 \("),
    11: (b"[1, 2]", r"is no JSON object but list"),
    20: (b'{"id": 20, "text": 7}', r"has int, not text, as 'text'"),
    25: (b'{"id": 25, "text": "half \\ud83d"}', r"has a lone surrogate, U\+D83D, in 'text'"),
}


@pytest.mark.parametrize("row", BAD_LINES)
def test_a_bad_line_ends_the_run_with_its_place(row, open_table, tmp_path):
    damage, message = BAD_LINES[row]
    path = lines(tmp_path / "a.jsonl", {row: damage})
    for most in (0, 1):
        table = lines(tmp_path / "b.jsonl", {2: b"{"}) if most else path
        with pytest.raises(UsageError) as error:
            texts(open_table(*dict.fromkeys([table, path]), max_bad_rows=most))
        assert str(error.value).startswith(f"{path}: line {row + 1} ")
        error.match(message)
        error.match("raise data.max_bad_rows")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("first", [b"17", b'\n\n"text"\n', b"\xef\xbb\xbfnull"])
def test_a_file_that_begins_with_no_row(first, open_table, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(first)
    with pytest.raises(UsageError, match=r"a\.jsonl: line [13] is no JSON"):
        texts(open_table(path))
    # A list, and objects of several lines.
    for rows in (b'[{"text": "a"}, {"text": "b"}]', b'{\n"text": "a"}\n\n{"text":\n"b"}', b'\xef\xbb\xbf["a", "b"]'):
        path.write_bytes(rows)
        assert texts(open_table(path)) == ["a", "b"]


def test_a_first_line_that_is_nested_deep(open_table, tmp_path):
    """Columns of several files are compared, for which first lines are read."""
    path = lines(tmp_path / "a.jsonl", {0: b"[" * 100_000 + b"]" * 100_000})
    whole = lines(tmp_path / "b.jsonl", {})
    with pytest.raises(UsageError, match=r"a\.jsonl: line 1 is no JSON \("):
        texts(open_table(path, whole))
    assert texts(open_table(path, whole, max_bad_rows=1)) == [*ROWS[1:], *ROWS]


def test_bad_lines_are_left_out_and_counted(open_table, tmp_path):
    path = lines(tmp_path / "a.jsonl", {row: damage for row, (damage, _) in BAD_LINES.items()})
    whole = lines(tmp_path / "b.jsonl", {})
    corpus = open_table(path, whole, max_bad_rows=6)
    assert texts(corpus) == [row for i, row in enumerate(ROWS) if i not in BAD_LINES] + ROWS
    assert corpus.skipped == {"bad": 6}
    again = open_table(path, whole, max_bad_rows=7)
    assert texts(again) == texts(corpus)
    assert again.content_hash() == corpus.content_hash()
    # What a run that allowed more has left in the cache allows no more here.
    with pytest.raises(UsageError, match=r"a\.jsonl: line 21 has int"):
        texts(open_table(path, whole, max_bad_rows=4))


def test_bad_records(open_table, tmp_path):
    path = cells(tmp_path / "a.csv", {3: b"3,one,two,three", 17: b'17,"\xff"'})
    corpus = open_table(path, max_bad_rows=2)
    assert texts(corpus) == [row for i, row in enumerate(ROWS) if i not in (3, 17)]
    assert corpus.skipped == {"bad": 2}
    # Records have two lines each, the header one.
    with pytest.raises(UsageError, match=r"a\.csv: line 8 has 4 fields, the header has 2; mend it"):
        texts(open_table(path, max_bad_rows=0))
    with pytest.raises(UsageError, match=r"a\.csv: line 35 is not UTF-8"):
        texts(open_table(path, max_bad_rows=1))
    path.write_bytes(b"id,te\xffxt\n1,b\n")
    with pytest.raises(UsageError, match=r"a\.csv: its header is not UTF-8"):
        texts(open_table(path, max_bad_rows=9))
    path.write_bytes(b'id,text\n1,"never closed\n2,b\n')
    with pytest.raises(UsageError, match=r"a\.csv: line 2 opens a quote that is never closed"):
        texts(open_table(path, max_bad_rows=9))


@pytest.mark.parametrize(
    ("content", "most", "left"),
    [
        ("text,label\nHello there,pos,\nBye now,neg,\nmore text,pos,\n", 3, []),
        ("id,text\n1,Hello, world\n2,Bye, now\n3,more, text\n", 3, []),
        ("id,text\n1,Hello, world\n2,Bye now\n3,more text\n", 1, ["Bye now", "more text"]),
        ("\n\nid,text\n\n1,Hello, world\n2,Bye now\n3,x\n", 1, ["Bye now", "x"]),
    ],
)
def test_a_first_record_of_too_many_fields(content, most, left, open_table, tmp_path):
    """pandas would take its first field as the row's name, and every text from the column beside."""
    path = tmp_path / "a.csv"
    path.write_text(content)
    line = next(n for n, line in enumerate(content.splitlines(), 1) if line.startswith(("Hello", "1,")))
    for allowed in (0, most, 0):
        corpus = open_table(path, max_bad_rows=allowed)
        if not allowed:
            with pytest.raises(UsageError, match=rf"a\.csv: line {line} has 3 fields, the header has 2; mend it"):
                texts(corpus)
        elif left:
            assert texts(corpus) == left
            assert corpus.skipped == {"bad": most}


@pytest.mark.parametrize(
    "content",
    [
        'text,n\na 5" pipe,1\nanother line,2\n6" and "so on",3\nfourth,4\n',
        '\ufeff"text, and\nmore",text\n1,b\n"a "quoted"" part",c\n',
        'id,text\r\n1,a\r\n\r\n  \r\n2,"b\r\nc"\r\n3\r\n4,d',
        "id,text\r1,a\r2,b\r",
    ],
)
def test_records_are_those_of_pandas(content, open_table, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(content, encoding="utf-8", newline="")
    expected = [text for text in pandas.read_csv(path, keep_default_na=False)["text"] if isinstance(text, str) and text]
    assert texts(open_table(path)) == expected
    assert texts(open_table(path, max_bad_rows=1, cache_dir=str(tmp_path / "other"))) == expected
    # A bad row in the middle takes nothing but itself along.
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(f"{'' if content.endswith(chr(13)) else chr(10)}8,9,10,11\n")
    corpus = open_table(path, max_bad_rows=1)
    assert texts(corpus) == expected
    assert corpus.skipped["bad"] == 1


@pytest.mark.parametrize("allowed", [(0, 1, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_what_is_kept_of_tables_belongs_to_their_bad_rows(suffix, allowed, open_table, tokenizer, tmp_path):
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        lines(path, {0: b'{"text": broken'})
    else:
        cells(path, {0: b"0,one,two,three"})

    def shards(most):
        return build_shards(open_table(path, max_bad_rows=most), tokenizer, tmp_path / "cache", val_fraction=0.2)

    for most in allowed:
        if most:
            splits = shards(most).meta["splits"].values()
            assert sum(split["documents"] for split in splits) == len(ROWS) - 1
            assert shards(most).meta["skipped"] == {"bad": 1}
            assert texts(open_table(path, max_bad_rows=most)) == ROWS[1:]
        else:
            with pytest.raises(UsageError, match=rf"a\.{suffix}: line {1 if suffix == 'jsonl' else 2} "):
                shards(most)


def test_the_content_hash_of_tables_without_bad_rows(open_table, tmp_path):
    """It is the same whatever is allowed; another table, although of the same bytes, is one without its bad row."""
    whole, damaged = lines(tmp_path / "a.jsonl", {}), lines(tmp_path / "b.jsonl", {5: b"{"})
    assert open_table(whole, max_bad_rows=3).content_hash() == open_table(whole).content_hash()
    assert open_table(damaged, max_bad_rows=3).content_hash() != open_table(damaged).content_hash()


def test_tables_without_bad_rows_need_no_place_for_copies(open_table, tmp_path, monkeypatch):
    path = lines(tmp_path / "a.jsonl", {})
    monkeypatch.setattr("birthmark.data.bad_rows.takes_files", lambda folder: False)
    hashed = open_table(path, max_bad_rows=3).content_hash()
    assert not list((tmp_path / "cache").glob("cleaned-*"))
    assert hashed == open_table(path).content_hash()


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "csv"])
def test_a_column_that_the_seventh_of_nine_files_lacks(suffix, open_table, tmp_path, write_table):
    texts_of = {i: [f"{i} {row}" for row in range(3)] for i in range(1, 10)}
    files = {i: tmp_path / f"{i}.{suffix}" for i in texts_of}
    paths = [write_table(file, texts_of[i], "content" if i == 7 else "text") for i, file in files.items()]
    with pytest.raises(UsageError, match=rf"^data\.text_field: no column 'text' in .*7\.{suffix}; .*'id', 'content'$"):
        texts(open_table(*paths))
    write_table(files[7], texts_of[7])
    assert len(texts(open_table(*paths))) == 27


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_damaged_file_among_several_is_named(suffix, open_table, tmp_path, write_table):
    paths = [write_table(tmp_path / f"{i}.{suffix}", ["a", "b", "c"]) for i in range(1, 4)]
    paths[1].write_bytes(b"no table at all" * 9)
    with pytest.raises(UsageError, match=rf"2\.{suffix}: damaged \(.*copy it again, or leave it out$"):
        texts(open_table(*paths, max_bad_rows=3))
