"""Code files of an exported model, assembled from this package's sources, so that no second decoder can drift.

Every definition that a root class reaches by name is copied verbatim from its module, with comments and docstrings;
classes keep only methods that something calls. Imports between modules are dropped, all others are gathered. Parts for
training only are replaced by those of ``plain_parts.py``, by name.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[3]
_PACKAGE = "models.exchange.exported"

CONFIGURATION, MODELING = "configuration_birthmark", "modeling_birthmark"

#: A definition: its module, below the package, and its name there.
Name = tuple[str, str]

_ROOTS: dict[str, Name] = {
    CONFIGURATION: (f"{_PACKAGE}.hub_config", "BirthmarkConfig"),
    MODELING: (f"{_PACKAGE}.hub_model", "BirthmarkForCausalLM"),
}
#: Parts for training only → their replacements.
_REPLACED: dict[Name, Name] = {
    (module, name): (f"{_PACKAGE}.plain_parts", name)
    for module, name in (
        ("models.activations", "activated"),
        ("models.attention.normalisers", "FusedSoftmax"),
        ("models.attention.aggregation", "build_part"),
        ("models.attention.correlation", "moment_kernels"),
        ("models.attention.rotation", "rotate"),
        ("models.attention.rotation", "rotate_and_multiply"),
        ("models.attention.fused.difference", "normed_difference"),
        ("models.attention.fused.rows", "scaled"),
        ("models.attention.weight_reader", "new_reader"),
        ("models.experts.fused_experts", "fused_experts"),
        ("models.experts.routed_mlp", "rows_of_experts"),
        ("models.init", "read_rows"),
        ("models.linear_cross_entropy", "linear_cross_entropy"),
        ("models.norms", "rms_norm"),
    )
}
#: Methods that nothing calls in the end, although others have their names.
_LEFT_OUT = {
    (("models.decoder", "Decoder"), "forward"),
    *((("models.attention.scores", "Scores"), name) for name in ("softmax", "lse", "_sloped")),
    (("models.attention.document_mask", "Documents"), "attend"),
}
#: Modules whose classes are called from outside, in all their methods.
_CALLED_FROM_OUTSIDE = {module for module, _ in _ROOTS.values()}

_TITLES = {
    CONFIGURATION: "The config of a Birthmark model, for ``transformers``.",
    MODELING: "A Birthmark model, for ``transformers``: the decoder that trained, with the methods of the library.",
}
_PREAMBLE = """
Written by ``birthmark export`` from the sources of Birthmark {version}, module by module, lowest first. It needs torch
and ``transformers`` alone, unpickles nothing, and opens no file and no connection. Tensors carry the names of their
axes.
"""
_RULE = "# " + "-" * 118
#: Decorator for type checkers alone, from a library that a user may lack.
_FOR_TYPES = "override"


@dataclass
class _Module:
    """A module of this package, by its definitions."""

    name: str
    lines: list[str]
    docstring: str
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    """Definitions in their order; an assignment includes the string after it."""
    internal: dict[str, Name] = field(default_factory=dict)
    """Names imported from modules of this package."""
    others: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Names imported from elsewhere: module, and the name in it or None for the module itself."""


@cache
def _read(name: str) -> _Module:
    text = PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = _Module(name, text.splitlines(), ast.get_docstring(tree) or "")
    last = ""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = name.split(".")[: -node.level] + (node.module or "").split(".")
            for alias in node.names:
                found.internal[alias.asname or alias.name] = (".".join(filter(None, base)), alias.name)
        elif isinstance(node, ast.ImportFrom):
            found.others |= {alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found.others |= {(alias.asname or alias.name).split(".")[0]: (alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.definitions.setdefault(node.name, []).append(node)
            last = node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names = [target] if isinstance(target, ast.Name) else list(ast.walk(target))
            bound = [one.id for one in names if isinstance(one, ast.Name)]
            for one in bound:
                found.definitions[one] = [node]
            last = bound[0]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            found.definitions[last].append(node)
    return found


def _resolved(name: Name) -> Name:
    """Find the module that defines a name, through any re-exports, or its replacement."""
    module = _read(name[0])
    if name[1] not in module.definitions and name[1] in module.internal:
        return _resolved(module.internal[name[1]])
    return _REPLACED.get(name, name)


def _methods(node: ast.stmt) -> list[ast.FunctionDef]:
    return [one for one in node.body if isinstance(one, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []


def _is_kept(name: Name, method: str, called: set[str]) -> bool:
    if (name, method) in _LEFT_OUT:
        return False
    # torch calls these.
    always = method in ("forward", "_apply") or (method.startswith("__") and method.endswith("__"))
    return always or method in called or name[0] in _CALLED_FROM_OUTSIDE


def _left_out(name: Name, node: ast.stmt, called: set[str]) -> list[ast.FunctionDef]:
    return [method for method in _methods(node) if not _is_kept(name, method.name, called)]


def _walk(name: Name, called: set[str]) -> Iterator[ast.AST]:
    """Yield all nodes of a definition, except those of methods that are left out."""
    for node in _read(name[0]).definitions[name[1]]:
        left_out = {id(method) for method in _left_out(name, node, called)}
        pending: list[ast.AST] = [node]
        while pending:
            one = pending.pop()
            if id(one) not in left_out:
                yield one
                pending.extend(ast.iter_child_nodes(one))


def _uses(name: Name, called: set[str]) -> set[str]:
    """Return the top-level names of its module that a definition uses."""
    module = _read(name[0])
    there = module.definitions.keys() | module.internal.keys() | module.others.keys()
    return {one.id for one in _walk(name, called) if isinstance(one, ast.Name)} & there - {name[1], _FOR_TYPES}


def _reached(roots: list[Name], called: set[str]) -> set[Name]:
    found: set[Name] = set()
    pending = list(roots)
    while pending:
        name = _resolved(pending.pop())
        if name in found:
            continue
        found.add(name)
        module = _read(name[0])
        for used in _uses(name, called):
            if used in module.internal:
                pending.append(module.internal[used])
            elif used in module.definitions:
                pending.append((module.name, used))
    return found


def _called(names: set[Name], called: set[str]) -> set[str]:
    """Return the names of attributes that definitions read."""
    return {one.attr for name in names for one in _walk(name, called) if isinstance(one, ast.Attribute)}


def _order(root: str) -> list[str]:
    """List modules, each after those that it imports."""
    found: list[str] = []

    def visit(module: str) -> None:
        if module not in found and PACKAGE.joinpath(*module.split(".")).with_suffix(".py").is_file():
            for imported, _ in _read(module).internal.values():
                visit(imported)
            found.append(module)

    for module, _ in _REPLACED.values():
        visit(module)
    visit(root)
    return found


def _text(name: Name, called: set[str]) -> str:
    """Return a definition's text with the comment above it, without the methods that are left out."""
    lines, nodes = _read(name[0]).lines, _read(name[0]).definitions[name[1]]
    gone: set[int] = set()
    parts = []
    for node in nodes:
        for method in _left_out(name, node, called):
            start, end = _first_line(method, lines), int(method.end_lineno or 0)
            while not lines[start - 2].strip():
                start -= 1
            gone |= set(range(start, end + 1))
        numbers = range(_first_line(node, lines), int(node.end_lineno or 0) + 1)
        kept = (lines[number - 1] for number in numbers if number not in gone)
        parts.append("\n".join(line for line in kept if line.strip() != f"@{_FOR_TYPES}"))
    return ("\n" if isinstance(nodes[-1], ast.Expr) else "\n\n\n").join(parts)


def _about(module: str) -> list[str]:
    """Return a module's first paragraph and its legend; the rest may describe parts that are left out."""
    first, *more = _read(module).docstring.split("\n\n")
    return [first, *(paragraph for paragraph in more if paragraph.startswith("Legend"))]


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    decorators = node.decorator_list if isinstance(node, ast.ClassDef | ast.FunctionDef) else []
    first = min([node.lineno, *(one.lineno for one in decorators)])
    while lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return first


def _imports(names: set[Name], called: set[str], elsewhere: set[Name]) -> str:
    """Write the imports of a file: from libraries, and from the other exported file."""
    whole: set[str] = set()
    parts: dict[str, set[str]] = {}
    for name in names:
        module = _read(name[0])
        for used in _uses(name, called):
            if used in module.others:
                source, inner = module.others[used]
                if inner is None:
                    whole.add(f"import {source}" + (f" as {used}" if used != source.split(".")[0] else ""))
                else:
                    parts.setdefault(source, set()).add(inner if inner == used else f"{inner} as {used}")
                continue
            target = _resolved(module.internal.get(used, (module.name, used)))
            if target[1] != used:
                raise ValueError(f"{module.name}: {used} has another name in {target[0]}: give it one name")
            if target in elsewhere:
                parts.setdefault(f".{CONFIGURATION}", set()).add(used)
    groups: tuple[list[str], ...] = ([], [], [])

    def group(source: str) -> list[str]:
        return groups[2 if source.startswith(".") else 0 if source.split(".")[0] in sys.stdlib_module_names else 1]

    for line in sorted(whole):
        group(line.split()[1]).append(line)
    for source, found in sorted(parts.items()):
        group(source).append(f"from {source} import {', '.join(sorted(found))}")
    return "\n\n".join("\n".join(one) for one in groups if one)


def _file(title: str, root: str, names: set[Name], called: set[str], elsewhere: set[Name], version: str) -> str:
    found: dict[str, str] = {}
    for module, name in sorted(names):
        if found.setdefault(name, module) != module:
            raise ValueError(f"{name} stands in {found[name]} and in {module}: one file needs one of another name")
    sections = []
    for module in _order(root):
        kept = [name for name in _read(module).definitions if (module, name) in names]
        if not kept:
            continue
        path = module.replace(".", "/").removeprefix("models/") + ".py"
        about = [line for paragraph in _about(module) for line in ["#", *textwrap.wrap(paragraph, 116)]]
        blocks = "\n".join([_RULE, f"# {path}", *(line if line == "#" else f"# {line}" for line in about), _RULE])
        above = ""
        for name in kept:
            node = _read(module).definitions[name][0]
            kind = "constant" if isinstance(node, ast.Assign | ast.AnnAssign) else "definition"
            gap = "\n" if above == kind == "constant" else "\n\n" if (above, kind) == ("", "constant") else "\n\n\n"
            blocks, above = blocks + gap + _text((module, name), called), kind
        sections.append(blocks)
    head = f'"""{title}\n{_PREAMBLE.format(version=version)}"""\n\nfrom __future__ import annotations\n\n'
    return head + _imports(names, called, elsewhere) + "\n\n" + "\n\n\n".join(sections) + "\n"


@cache
def exported_code() -> dict[str, str]:
    """Return the code files by name: the same text for every model.

    Raises:
        ValueError: two modules give one name to different things.
    """
    from .... import __version__

    called: set[str] = set()
    names: set[Name] = set()
    roots = list(_ROOTS.values())
    while True:
        before = len(names), len(called)
        names = _reached(roots, called)
        called |= _called(names, called)
        if before == (len(names), len(called)):
            break
    of_config = _reached([_ROOTS[CONFIGURATION]], called)
    split = {CONFIGURATION: (of_config, set()), MODELING: (names - of_config, of_config)}
    return {
        f"{file}.py": _file(_TITLES[file], _ROOTS[file][0], kept, called, other, __version__)
        for file, (kept, other) in split.items()
    }
