"""URLs and the credentials in them."""

import time
from itertools import permutations
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark import urls
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.messages import one_line, reason_of
from birthmark.urls import (
    VARIABLE,
    credentials_for_children,
    credentials_of,
    divide,
    hide_credentials,
    keep_credentials,
    with_credentials,
    without_credentials,
)

AMAZON = "X-Amz-Algorithm=A&X-Amz-Credential=S3cr3t%2Fus&X-Amz-Expires=9&X-Amz-Signature=S3cr3t"
AZURE = "sv=2024-05&se=2030-01-01&sr=b&sp=r&sig=S3cr3t%2B"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(urls, "_given", {})
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("http://me:S3cr3t@host:80/a.txt", "http://host:80/a.txt"),
        ("https://S3cr3t@host/a.txt", "https://host/a.txt"),
        ("http://me:S3/cr3t@host:80/a?v=1", "http://host:80/a?v=1"),
        ("http://me:S3?cr3t@host/a", "http://host/a"),
        ("sftp://me:S3cr3t@host/a", "sftp://host/a"),
        ("s3://id:S3cr3t@bucket/a", "s3://bucket/a"),
        (f"https://host/a?{AMAZON}", "https://host/a"),
        (f"https://host/a?v=3&{AMAZON}&w=a+b", "https://host/a?v=3&w=a+b"),
        (f"https://host/a.parquet?{AZURE}", "https://host/a.parquet"),
        ("https://host/a?AWSAccessKeyId=S3cr3t&Signature=S3cr3t&Expires=7", "https://host/a"),
        ("https://host/a?access_token=S3cr3t#part", "https://host/a#part"),
        ("https://host/a?v=1&api_key=S3cr3t", "https://host/a?v=1"),
    ],
)
def test_credentials_are_taken_out_and_put_back(url, bare):
    found, credentials = divide(url)
    assert found == bare
    assert divide(found) == (found, ("", ()))
    # The same address again, as the standard library reads it.
    again = with_credentials(found, credentials)
    assert divide(again) == (found, credentials)
    if "S3cr3t" in url:
        assert urlsplit(again).netloc == urlsplit(url).netloc
        assert sorted(parse_qsl(urlsplit(again).query)) == sorted(parse_qsl(urlsplit(url).query))


@pytest.mark.parametrize(
    "url",
    [
        "stdlib", "hf:org/name@rev", "notes/a@b:c.txt", "http://host/a?v=1&author=me&page=2&sv=3", "sftp://me@host/a",
        "abfs://container@account.dfs.core.windows.net/a", "http://[::1]:80/a@b", "s3://bucket/a//b?c#d", "http://",
    ],
)  # fmt: skip
def test_what_has_no_credentials_is_left_to_the_letter(url):
    assert without_credentials(url) == hide_credentials(url) == url


def test_no_order_and_no_case_of_a_query_hides_a_secret():
    for fields in permutations(["Sig=S3cr3t", "SV=2", "x-amz-SIGNATURE=S3cr3t", "v=1"]):
        assert without_credentials(f"https://host/a?{'&'.join(fields)}") == "https://host/a?v=1"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.text("abc?/#@:%.=&", max_size=12))
def test_a_password_of_any_letters_never_stays(password, path):
    assert "S3cr3t" not in without_credentials(f"http://me:S3cr3t{quote(password, safe='')}@host/{path}")


def test_texts_lose_the_credentials_of_every_url():
    text = "--path=['http://me:S3cr'3t@h/a?sig=S3cr3t','http://you:S3cr3t@h/b'],http://h/c?token=S3cr3t (see https://h)"
    assert hide_credentials(text) == "--path=['http://h/a','http://h/b'],http://h/c (see https://h)"


@pytest.mark.parametrize("part", ["a", "a.", "AError", "://", "a://", "a:", ",a", "1:", "&sig=", "@", 'b://"'])
def test_a_long_text_is_read_in_time_that_grows_with_its_length(part):
    """40 kB took up to 34 s, and 60 kB more than twice that."""
    text = part * (60_000 // len(part))
    start = time.process_time()
    for whole in (text, f"http://h{text} http://me:S3cr3t@h"):
        assert "S3cr3t" not in hide_credentials(whole) + reason_of(ValueError(whole))
    assert time.process_time() - start < 5


@pytest.mark.parametrize("cut", [one_line, lambda text: reason_of(ValueError(text))])
@pytest.mark.parametrize("before", [0, 180, 195, 4080])
def test_no_cut_leaves_half_of_a_password(cut, before):
    """The @ that says that it is one may lie behind the last character that is kept."""
    for password in ("S3cr3t", "S3cr3t" * 2000):
        assert "S3cr" not in cut(f"{'x ' * (before // 2)}http://me:{password}@host/a")


def test_a_config_never_holds_them_and_this_process_does():
    config = DataConfig(
        path=["http://me:S3cr3t@h/a.txt", "notes"],
        tokenizer="http://me:S3cr3t@h/t.json?sig=S3cr3t",
        sources=[SourceConfig("http://you:S3cr3t@h/s", val_path=["http://h/v?token=S3cr3t"])],
    )
    assert "S3cr3t" not in repr(config)
    assert config.path == ["http://h/a.txt", "notes"]
    assert credentials_of("http://h/a.txt").user == "me:S3cr3t"
    assert credentials_of("http://h/s/deep/file").user == "you:S3cr3t"
    assert credentials_of("http://h/t.json") == ("me:S3cr3t", (("sig", "S3cr3t"),))
    for other in ("http://h/a", "http://h/sa", "https://h/a.txt", "http://h:81/a.txt", "http://g/a.txt", "notes"):
        assert not credentials_of(other)


def test_the_environment_gives_them_too_and_children_get_both(monkeypatch):
    monkeypatch.setenv(VARIABLE, "http://me:S3cr3t@h http://you:S3cr3t@h/deep/er")
    assert credentials_of("http://h/a").user == credentials_of("http://h/deep/era").user == "me:S3cr3t"
    assert credentials_of("http://h/deep/er/a").user == "you:S3cr3t"
    keep_credentials("http://she:S3cr3t@h/a")
    assert credentials_of("http://h/a").user == "she:S3cr3t"
    variables = credentials_for_children()
    monkeypatch.setattr(urls, "_given", {})
    monkeypatch.setenv(VARIABLE, variables[VARIABLE])
    assert credentials_of("http://h/a").user == "she:S3cr3t"
    assert credentials_of("http://h/b").user == "me:S3cr3t"
