"""The words of a command line: one grammar for the names, options and fields of every command.

A name may be given by its position or by an option (``demo`` or ``--config demo``), and stand anywhere. Dashes and
underscores in options are one spelling. An option of several values may be given several times. A command with
``--set`` takes the fields of a run as options too, and one with the fields takes ``--set``.
"""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from ..trainer.config import RunConfig
from ..trainer.config_parser import ConfigFile, Parser, field_kinds, unknown_fields, unknown_option

#: The metavar of an argument → the options by which it may be given too, beside its own name.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "CONFIG": ("config",),
    "STUDY": ("study", "config"),
    **dict.fromkeys(("MODEL", "RUN", "SUITE"), ("model", "models", "run", "runs")),
}
#: The end of a message about a word that sets no field.
FORM = "write FIELD=VALUE, as in trainer.max_steps=100"


def normal_dashes(arguments: Sequence[str]) -> list[str]:
    """Join the words of options by underscores, as in fields: ``--seq-len X`` becomes ``--seq_len X``."""
    return [
        "--" + a[2:].partition("=")[0].replace("-", "_") + "".join(a[2:].partition("=")[1:]) if a[:2] == "--" else a
        for a in arguments
    ]


def resolve_home(arguments: Sequence[str]) -> list[str]:
    """Replace ``~/`` behind an equals sign by the user's home, since shells do not: ``--out=~/page.html``."""
    return [re.sub(r"^([\w.-]+=)~(?=/)", lambda head: f"{head[1]}{Path.home()}", a) for a in arguments]


def named_arguments(parser: Parser) -> dict[str, Action]:
    """Return the options that stand for an argument without dashes, each with the argument; ``--config`` → CONFIG."""
    known, found = parser._option_string_actions, dict[str, Action]()
    for action in parser._actions:
        is_bare = action.dest == parser.bare
        if action.option_strings and not is_bare:
            continue
        kind = parser.bare_kind if is_bare else str(action.metavar)
        for name in (action.dest, *(name for one in kind.split("|") for name in _OPTIONS.get(one, ()))):
            if f"--{name}" not in known:
                found.setdefault(f"--{name}", action)
    return found


def arrange(parser: Parser, words: Sequence[str]) -> list[str]:
    """Put the words of a command line into the order and the spelling that its parser reads.

    Args:
        parser: the parser of the command.
        words: the words after the command's name, with underscores in options.

    Raises:
        UsageError: no such option, or a name too many; the message repeats it.
    """
    if parser.passes_on or {"-h", "--help"} & set(words):
        return list(words)
    return _Arranged(parser).read(list(words))


@dataclass
class _Arranged:
    """The words of one command line, by kind."""

    parser: Parser
    configs: list[str] = field(default_factory=list)
    """Config files, which come first: fields replace those of a file, wherever they stand."""
    options: list[list[str]] = field(default_factory=list)
    """Options with their values."""
    bare: list[str] = field(default_factory=list)
    """Words without an option."""
    named: dict[str, list[str]] = field(default_factory=dict)
    """Arguments that were given by an option: ``dest`` → values."""
    lists: dict[str, list[str]] = field(default_factory=dict)
    """Options of several values: ``dest`` → the option and all its values."""

    def __post_init__(self) -> None:
        self.known: Mapping[str, Action] = self.parser._option_string_actions
        self.by_name = named_arguments(self.parser)

    def read(self, words: list[str]) -> list[str]:
        while words:
            word = words.pop(0)
            if word == "--":
                self.bare += words
                break
            if _is_option(word):
                self._add_option(word, words)
            else:
                self.bare.append(word)
        arguments = self._arguments()
        options = [word for one in self.options for word in one]
        if any(word.startswith("-") for word in arguments):
            return [*self.configs, *options, "--", *arguments]
        return [*self.configs, *arguments, *options]

    def _add_option(self, word: str, rest: list[str]) -> None:
        """Sort one option with its values, which are taken from ``rest``."""
        option, equals, value = word.partition("=")
        action = self.known.get(option) or self.by_name.get(option)
        if action is None:
            self._add_field(word, rest)
            return
        values = [value] if equals else list(_values(action, option, rest))
        if "=" in str(action.metavar) and not option.startswith("--print"):
            _check_given(option, values, rest, FORM if option == "--set" else f"write {action.metavar}")
        if option in self.by_name and action.dest != self.parser.bare:
            if not values:
                raise UsageError(f"{option}: give a value")
            # Several models are one list, in their order.
            given = self.bare if action.nargs in ("+", "*") else self.named.setdefault(action.dest, [])
            given += values
        elif isinstance(action, ConfigFile):
            self.configs += [f"{option}={one}" for one in values] or [word]
        elif action.dest == self.parser.bare:
            self.options.append([f"--{action.dest}={one}" for one in values] or [f"--{action.dest}"])
        elif action.nargs == "+" and (before := self.lists.get(action.dest)) is not None:
            before += values
        else:
            self.options.append([word] if equals and action.nargs != "+" else [option, *values])
            if action.nargs == "+":
                self.lists[action.dest] = self.options[-1]

    def _add_field(self, word: str, rest: list[str]) -> None:
        """Sort an option that the parser does not have: a field of a run for ``--set``, or ``--set`` for fields."""
        option, equals, value = word.partition("=")
        name = option.lstrip("-")
        if name == "set" and self.parser.bare:
            given = [value] if equals else list(_words(rest, form="="))
            if not equals:
                _check_given("--set", given, rest, FORM)
            for one in given:
                if not re.match(r"[^=]+=", one):
                    raise UsageError(f"--set {one}: {FORM}")
            self.options.append(normal_dashes([f"--{one}" for one in given]))
        elif "--set" in self.known and name in field_kinds(RunConfig):
            given = [value] if equals else list(_words(rest, 1)) or ["true"]
            self._add_option("--set", [f"{name}={given[0]}"])
        elif any(option.startswith(f"{one}.") for one in self.known):
            # A key of a field that is a mapping.
            self.options.append([word, *([] if equals else _words(rest, 1))])
        elif "--set" in self.known and "." in name:
            raise UsageError(f"--{next(iter(unknown_fields([name])), f'{name}: a group; give --{name}.FIELD VALUE')}")
        else:
            names = [*self.known, *self.by_name]
            raise UsageError(unknown_option(name, [one.lstrip("-") for one in names], self.parser.prog))

    def _arguments(self) -> list[str]:
        """Return the arguments without dashes in the parser's order, those given by an option in their place."""
        places = [action for action in self.parser._actions if not action.option_strings]
        if not places and self.parser.bare:
            self._add_bare()
            return []
        if not self.named:
            return self.bare if places else self._no_more(self.bare)
        rest, found = list(self.bare), []
        for action in places:
            values = self.named.get(action.dest)
            if values is None:
                values, rest = rest[:1], rest[1:]
            if not values and action.nargs != "?":
                raise UsageError(f"{action.dest}: missing; see {self.parser.prog} --help")
            self._no_more(values[1:])
            found += values
        self._no_more(rest)
        return found

    def _add_bare(self) -> None:
        """Give words without an option to the option that they stand for."""
        action = self.known[f"--{self.parser.bare}"]
        if isinstance(action, ConfigFile):
            self.configs = [f"--config={word}" for word in self.bare] + self.configs
        else:
            self._no_more(self.bare[1:])
            self.options = [[f"--{action.dest}={word}"] for word in self.bare] + self.options

    def _no_more(self, words: list[str]) -> list[str]:
        if words:
            raise UsageError(f"{words[0]}: one name too many; see {self.parser.prog} --help")
        return []


def _check_given(option: str, values: list[str], rest: list[str], form: str) -> None:
    """Raise UsageError for an option without a value of its form."""
    if not values:
        raise UsageError(f"{' '.join([option, *rest[:1]])}: {form}")


def _is_option(word: str) -> bool:
    """Return True for an option; a negative number is a value, and so is a text with blanks."""
    return re.match(r"--?[A-Za-z_]", word) is not None and " " not in word.partition("=")[0]


def _values(action: Action, option: str, rest: list[str]) -> Iterator[str]:
    """Take the values of an option from the words that follow it."""
    if action.nargs == 0 or option == "--print_config":
        return
    if action.nargs in ("+", "*"):
        # A form such as FIELD=VALUE shows where the values end.
        yield from _words(rest, form="=" if "=" in str(action.metavar) else "")
    else:
        yield from _words(rest, 1)


def _words(rest: list[str], most: int | None = None, form: str = "") -> Iterator[str]:
    """Take words from ``rest`` up to the next option, at most ``most`` of them, and only such as contain ``form``."""
    while rest and (most is None or most > 0) and not _is_option(rest[0]) and rest[0] != "--" and form in rest[0]:
        yield rest.pop(0)
        most = None if most is None else most - 1
