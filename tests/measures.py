"""Print how large the house is: files, lines, folders, and docstrings that begin with a question word.

``python tests/measures.py --files`` lists the files that are short or have one importer; ``--docstrings`` lists the
docstrings.
"""

import argparse
import ast
import io
import statistics
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Folders that are no part of the product.
BESIDE = {"tests", "benchmarks", "examples", "research", "docs", "setup.py"}
QUESTION_WORDS = {"what", "which", "whether", "how", "where", "who"}
#: A file of fewer lines is counted as short, and one of fewer lines with one importer as a part of its importer.
SHORT, SHORT_WITH_ONE_IMPORTER = 40, 60


def product_files() -> list[Path]:
    """List the tracked Python files of the package, without tests, benchmarks, research and docs."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines() if name.partition("/")[0] not in BESIDE]
    return [file for file in files if file.is_file()]


def code_lines(text: str) -> int:
    """Count the lines that hold code: neither blank, nor comments, nor docstrings."""
    found: set[int] = set()
    other = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in other:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of a file: of the module, its classes and functions, and their fields."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def dotted_name(file: Path) -> str:
    """Return the module's name without the package's."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def importers(files: list[Path]) -> dict[Path, set[Path]]:
    """Return the product files that import each product file."""
    modules = {dotted_name(file): file for file in files}
    found: dict[Path, set[Path]] = defaultdict(set)
    for file in files:
        package = file.relative_to(ROOT).parent.parts
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            above = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*above, *([node.module] if node.module else [])]).removeprefix("birthmark.")
            for alias in node.names:
                imported = modules.get(f"{name}.{alias.name}") or modules.get(name)
                if imported is not None:
                    found[imported].add(file)
    return found


def short_with_one_importer() -> list[str]:
    """List the product files of fewer than 60 lines that one file imports, which could be a part of it."""
    files = product_files()
    by = importers(files)
    few = [
        file for file in files if len(by[file]) == 1 and len(file.read_text().splitlines()) < SHORT_WITH_ONE_IMPORTER
    ]
    return [file.relative_to(ROOT).as_posix() for file in few]


def main() -> None:
    """Print the table, and the lists that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list short files and those with one importer")
    parser.add_argument("--docstrings", action="store_true", help="list docstrings that begin with a question word")
    options = parser.parse_args()
    files = product_files()
    texts = {file: file.read_text() for file in files}
    lines = {file: len(text.splitlines()) for file, text in texts.items()}
    by = importers(files)
    short = [file for file in files if lines[file] < SHORT]
    lone = [ROOT / name for name in short_with_one_importer()]
    said = [(file, line, text) for file in files for line, text in docstrings(file) if text]
    asking = [one for one in said if one[2].split()[0].strip(",:;.?").lower() in QUESTION_WORDS]
    rows = {
        "product files": len(files),
        "lines": sum(lines.values()),
        "code lines": sum(code_lines(text) for text in texts.values()),
        "median lines": statistics.median(lines[file] for file in files),
        "folders": len({file.parent for file in files}),
        f"files under {SHORT} lines": len(short),
        f"files under {SHORT_WITH_ONE_IMPORTER} lines with one importer": len(lone),
        "docstrings that begin with a question word": f"{len(asking) / len(said):.1%} of {len(said)}",
    }
    for name, value in rows.items():
        print(f"{name:<50} {value}")
    if options.files:
        for file in sorted(set(short) | set(lone)):
            print(f"{lines[file]:5} {file.relative_to(ROOT)} <- {', '.join(map(dotted_name, sorted(by[file]))) or '-'}")
    if options.docstrings:
        for file, line, text in asking:
            print(f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")


if __name__ == "__main__":
    main()
