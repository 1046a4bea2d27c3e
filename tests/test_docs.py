"""The documentation, held to what it says: its blocks run as they are written, and what it names exists.

A page's shell and Python blocks run in their order, in a folder of their own that holds what a reader would have: the
shipped configs (made small, so that a run takes a second), some text, and a demo run. Comments before a block say more:

- ``<!-- needs: X -->``: it cannot run here; its command lines must parse.
- ``<!-- slow: REASON -->``: the same, and it runs by hand, with ``pytest -m slow tests/test_docs.py``.
- ``<!-- given: NAMES -->``: names that a Python block takes from the reader's own code; ``GIVEN`` has them.
- ``<!-- file: NAME -->``: the reader saves it under this name; later blocks use the file.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from markdown_it import MarkdownIt

from birthmark.launch.cli import main
from birthmark.launch.command_line import normal_dashes
from birthmark.launch.command_table import COMMANDS, parse_command
from birthmark.trainer.by_name import shipped_configs

#: Of the repository, whichever birthmark is imported: that of a wheel must run the same blocks.
ROOT = Path(__file__).resolve().parents[1]
SITE = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: With those in the repository alone: the log, and the rows behind the results.
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *SITE, *sorted((ROOT / "research").rglob("*.md"))]
#: Languages of blocks that run, and of those that show something.
RUN, SHOWN = {"sh", "python"}, {"text", "json", "yaml"}
MARK = re.compile(r"<!--\s*(needs|slow|given|file):\s*(.+?)\s*-->")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@dataclass
class Block:
    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self):
        return f"{name_of(self.page)}:{self.line}\n{self.text}"


@cache
def tokens(page):
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page):
    """The fenced blocks of a page, with the comments directly before them."""
    found, marks = [], {}
    for token in tokens(page):
        if token.type == "fence":
            found.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, marks))
        marks = dict(MARK.findall(token.content)) if token.type == "html_block" else {}
    return found


# ---------------------------------------------------------------- command lines


def commands(block):
    """Words of the block's command lines, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def without_variables(words):
    """The environment variables that a command line begins with, by name, and the rest of it."""
    found = {}
    while assigned := re.fullmatch(r"([A-Z_]+)=(.*)", words[0]):
        found[assigned[1]], words = assigned[2], words[1:]
    return found, words


def parse(arguments):
    """The real parser's view of a command line; a wrong one is an error."""
    name, *rest = normal_dashes(arguments)
    with contextlib.suppress(SystemExit) if "--help" in rest else contextlib.nullcontext():
        parse_command(name, rest)


def check_parses(block):
    """What stands in the block would start, if what it needs were here."""
    if block.language == "python":
        compile(block.text, f"{name_of(block.page)}:{block.line}", "exec")
        imports = [line for line in block.text.splitlines() if re.match(r"(from|import) ", line)]
        exec("\n".join(imports), {})
        return
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for words in commands(block):
        _, words = without_variables(words)
        launchers = [i for i, word in enumerate(words) if re.fullmatch(r"launch/\w+\.(sh|sbatch)", word)]
        if words[0] == "srun":
            words = words[words.index("birthmark") :]
        if words[0] == "birthmark":
            parse(words[1:])
        elif launchers:
            assert (ROOT / words[launchers[0]]).is_file()
            parse(["pretrain", *words[launchers[0] + 1 :]])
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
        else:
            raise AssertionError(f"no way to check {shlex.join(words)!r}: {block}")


def run_shell(block, python):
    """Run it: lines of plain ``birthmark`` in this process, others in a shell."""
    lines = [without_variables(words) for words in commands(block)]
    if all(words[0] == "birthmark" for _, words in lines):
        for variables, words in lines:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                try:
                    status = main(words[1:])
                except SystemExit as left:
                    status = left.code
            assert not status, f"{shlex.join(words)}: exit status {status}, in {block}"
        return
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHON": python}
    subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True, env=environment, timeout=600)


# ---------------------------------------------------------------- what readers have


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def token_rows():
    return torch.randint(0, 61, (8, 12), generator=torch.Generator().manual_seed(0))


def module_and_batches():
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = llama()

        def training_step(self, batch, batch_idx):
            return self.net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return {"module": Module(), "batches": torch.utils.data.DataLoader(token_rows(), batch_size=4)}


def arguments_of_a_trainer():
    import transformers

    settings = {"output_dir": "out", "max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    rows = [{"input_ids": row, "labels": row} for row in token_rows()]
    return {"model": llama(), "arguments": transformers.TrainingArguments(**settings), "dataset": rows}


def plain_loop():
    model = llama()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "batches": token_rows().split(4)}


GIVEN = {
    "module and batches": module_and_batches,
    "model, arguments and dataset": arguments_of_a_trainer,
    "model, optimizer and batches": plain_loop,
}

#: What makes a shipped config one that trains in a second; the architecture stays.
SMALL = {
    "model": {"d_model": 16, "vocab_size": 300, "max_seq_len": 64},
    "data": {"path": "notes", "cache_dir": "cache"},
    "trainer": {
        "max_steps": 2, "micro_batch_size": 1, "global_batch_size": 2, "checkpoint_every": 1000, "val_sequences": 4,
        "log_every": 100, "device": "cpu",
    },
    "snapshot": {"n_sequences": 8, "seq_len": 32, "n_strangers": 1},
    "log": {"wandb": "off"},
}  # fmt: skip


def shrink(file):
    config = yaml.safe_load(file.read_text())
    keep = {} if config["data"]["path"] == "stdlib" else {"path": config["data"]["path"]}
    for group, fields in SMALL.items():
        config[group] = {**config.get(group, {}), **fields}
    config["snapshot"].pop("probes", None)  # a second probe only draws every picture twice
    for name in ("n_layers", "n_heads"):
        config["model"][name] = min(config["model"][name], 2)
    if "fingerprint" in config["snapshot"]:
        config["snapshot"]["fingerprint"] |= {"n_inputs": 20, "n_strangers": 1}
    config["data"] |= keep
    file.write_text(yaml.safe_dump(config, sort_keys=False))


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory, no_page):
    """What a reader has who cloned the project and typed ``make pretrain``, but small."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in ("demo", "tiny_demo", "sinks", "sinks_headnorm", "seedprint"):
        shrink(folder / "configs" / f"{name}.yaml")
    for name in ("sinks", "seedprint"):
        study = folder / "configs" / "studies" / f"{name}.yaml"
        content = yaml.safe_load(study.read_text())
        content["init_seeds"] = content["init_seeds"][:2]
        if "arms" in content:
            content["arms"] = {name: content["arms"][name] for name in ("plain", "headnorm")}
        if "continue" in content:
            content["continue"] = {"readmes": {"data.path": "notes", "trainer.max_steps": 2}}
            content["test"] |= {"n_inputs": 20}
        study.write_text(yaml.safe_dump(content, sort_keys=False))
    (folder / "notes").mkdir()
    for page in ("docs/cluster.md", "research/log.md"):
        shutil.copy(ROOT / page, folder / "notes")
    shutil.copytree(
        ROOT / "launch", folder / "launch", ignore=shutil.ignore_patterns("*.py", "__pycache__", "commands")
    )
    run = yaml.safe_load((folder / "configs" / "demo.yaml").read_text())
    run["trainer"] |= {"global_batch_size": 64, "strategy": "fsdp2"}  # 16 processes may share it
    (folder / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    with contextlib.chdir(folder), no_page():
        assert main(["pretrain", "--config", "configs/demo.yaml", "--run_dir", "runs/demo"]) == 0
    for other in ("a", "b", "my-run"):
        shutil.copytree(folder / "runs" / "demo", folder / "runs" / other)
    return folder


@contextlib.contextmanager
def shipped_from(folder):
    """Inside, configs that are named without a path are the small ones of ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        root = folder / "configs"
        patch.setattr(shipped_configs, "_ROOT", root)
        folders = {"run": root, "model": root / "models", "study": root / "studies"}
        patch.setattr(shipped_configs, "_FOLDERS", folders)
        yield


#: Pages on which a run draws its own page at its end, as for every reader. It takes ten times as long as these runs: on
#: the other pages they end as without matplotlib, and what is said of pages is drawn by ``birthmark report``.
DRAWN = {"README.md"}


@contextlib.contextmanager
def modules_of_its_own():
    """Inside, modules are imported anew: pages have files of one name, and each must do with its own."""
    before = set(sys.modules)
    yield
    here = str(Path.cwd())
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(here):
            del sys.modules[name]


def run_page(page, folder, python, no_page, slow):
    """Run its blocks in their order; Python blocks share their names, as one session of a reader's would."""
    names = {}
    end = contextlib.nullcontext() if slow or name_of(page) in DRAWN else no_page()
    with contextlib.chdir(folder), modules_of_its_own(), shipped_from(folder), end:
        for block in blocks(page):
            if "file" in block.marks:
                Path(block.marks["file"]).write_text(block.text)
            elif block.language not in RUN:
                continue
            elif "needs" in block.marks or ("slow" in block.marks and not slow):
                check_parses(block)
            elif block.language == "sh":
                run_shell(block, python)
            else:
                names |= given_to(block)
                exec(compile(block.text, f"{name_of(page)}:{block.line}", "exec"), names)


def given_to(block):
    return GIVEN[block.marks["given"]]() if "given" in block.marks else {}


WITH_BLOCKS = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]
SLOW = [page for page in WITH_BLOCKS if any("slow" in block.marks for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
def test_every_block_runs_or_parses_as_it_is_written(page, readers_folder, tmp_path, python, no_page):
    run_page(page, shutil.copytree(readers_folder, tmp_path / "reader"), python, no_page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_slow_blocks_run_as_they_are_written(page, readers_folder, tmp_path, python, no_page):
    run_page(page, shutil.copytree(readers_folder, tmp_path / "reader"), python, no_page, slow=True)


@pytest.mark.slow
def test_every_block_runs_with_birthmark_from_its_wheel_alone(installed):
    """In a fresh environment and outside of the repository, where of birthmark there is the wheel alone.

    Libraries come from the environment that runs the tests, by a ``.pth`` file.
    """
    where = [installed.python, "-c", "import birthmark; print(birthmark.__file__)"]
    outside = {"cwd": installed.folder, "env": installed.env, "capture_output": True, "text": True}
    file = Path(subprocess.run(where, check=True, **outside).stdout.strip())
    assert file.is_relative_to(installed.folder)
    test = f"{Path(__file__).resolve()}::test_every_block_runs_or_parses_as_it_is_written"
    done = subprocess.run([installed.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", test], **outside)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"{len(WITH_BLOCKS)} passed" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page):
    for block in blocks(page):
        assert block.language in RUN | SHOWN, block
        assert not block.marks or block.language in RUN or block.marks.keys() == {"file"}, block


# ---------------------------------------------------------------- what pages name

#: Folders of the repository whose paths pages name.
FOLDERS = sorted(
    f.name for f in ROOT.iterdir() if f.is_dir() and f.name[0] != "." and (ROOT / f / "__init__.py").exists()
)
PATH = re.compile(rf"\.?(?:{'|'.join([*FOLDERS, 'tests', 'docs', 'benchmarks', 'examples'])})/[\w./*-]+")


def inline(page, kind):
    return [child for token in tokens(page) if token.type == "inline" for child in token.children if child.type == kind]


def there(path):
    """Whether a path of the repository is there; one with NAME in it is of a file to come, in a folder that is."""
    folder, _, name = path.rpartition("/")
    if "NAME" in name:
        return (ROOT / folder).is_dir()
    return (ROOT / path).exists() or (ROOT / f"{path}.yaml").is_file() or (ROOT / "configs" / f"{path}.yaml").is_file()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_every_path_that_a_page_names_is_there(page):
    codes = [*(code.content for code in inline(page, "code_inline")), *(block.text for block in blocks(page))]
    paths = {path for code in codes for path in PATH.findall(code) if path == code or page.name != "CHANGELOG.md"}
    assert {path for path in paths if not there(path)} == set()


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    found = tokens(page)
    titles = [found[i + 1].content for i, token in enumerate(found) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_every_link_leads_somewhere(page):
    links = [token.attrs["href"] for token in inline(page, "link_open")]
    for link in [*links, *(token.attrs["src"] for token in inline(page, "image"))]:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_the_dockerfile_names_what_is_there():
    """Its lines run in no test: they need docker, a network and a GPU."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    inside = re.findall(r"docker run .* birthmark ((?:make|birthmark) .*)", text) + re.findall(
        r"^RUN (make .*)", text, re.M
    )
    assert len(inside) == 3
    for line in inside:
        check_parses(Block(ROOT / "Dockerfile", 1, "sh", line))
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n", 1)[1].split()
    listed = subprocess.run(["git", "ls-files", *ignored], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout == ""


def test_the_map_of_the_docs_has_all_pages():
    home = ROOT / "docs/README.md"
    linked = {(home.parent / token.attrs["href"]).resolve() for token in inline(home, "link_open")}
    assert set(SITE) - {home} <= linked


def test_the_readme_is_short_and_leads_to_the_docs():
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").split()) < 500
    assert "docs/README.md" in {token.attrs["href"] for token in inline(readme, "link_open")}


def test_the_site_is_built_without_a_warning(tmp_path):
    """Strict: a page in no menu, a link or an anchor that leads nowhere ends it (``--quiet`` would hide them)."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        build, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    loaded = r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?https?:"""
    assert not [
        page for page in (tmp_path / "site").rglob("*.html") if re.search(loaded, page.read_text(encoding="utf-8"))
    ]


def test_a_list_stands_apart_from_its_paragraph():
    """GitHub takes a line that begins with a dash for a list anywhere; the site's reader after a blank line alone."""
    for page in PAGES:
        found = tokens(page)
        lines = page.read_text(encoding="utf-8").splitlines()
        starts = [token.map[0] for token in found if token.type.endswith("_list_open") and token.level == 0]
        assert not [f"{name_of(page)}:{n + 1}" for n in starts if n and lines[n - 1].strip()[:1] not in ("", "#", "<")]


def test_every_command_that_a_page_names_is_one():
    for page in PAGES:
        for code in inline(page, "code_inline"):
            if re.match(r"birthmark [a-z]", code.content):
                assert code.content.split()[1] in COMMANDS, (name_of(page), code.content)


def rows(page, heading):
    """Cells of the first table under a heading, row by row, without the table's own head."""
    section = page.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_table_of_rooms_is_that_of_the_house():
    house = ast.parse((ROOT / "tests" / "test_house.py").read_text())
    (floors,) = [
        ast.literal_eval(node.value)
        for node in house.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    ]
    written = [(int(floor), room.strip("`")) for floor, room, _ in rows(ROOT / "CONTRIBUTING.md", "Where things are")]
    assert written == [(floor, room) for floor, rooms in enumerate(floors) for room in rooms]


def test_every_name_that_a_recipe_gives_is_in_one_of_its_files():
    recipes = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Recipes\n")[1]
    for step in re.findall(r"^\d\. (?:.+\n?)(?:   .+\n?)*", recipes, flags=re.M):
        paths = re.findall(r"`(\w[\w/]*/\w+\.\w+)`", step)
        files = [file for path in paths for file in ROOT.glob(path.replace("NAME", "*"))]
        names = re.findall(r"`([A-Z][A-Za-z_]*[A-Z_a-z])`", step)
        content = "".join(file.read_text(encoding="utf-8") for file in files)
        assert not [name for name in names if name != "NAME" and not re.search(rf"\b{name}\b", content)], step
