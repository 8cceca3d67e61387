"""A recipe in the making out of an old file: what was said where, what changed, what was left out."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ascendfactory.backends.common import check_options
from ascendfactory.core.messages import UserError, nearest, pick

Tree = dict[str, Any]
Rule = tuple[str, Callable[[Any], Any]] | str | None  # recipe key (and conversion), or None: decided by AscendFactory


@dataclass
class Migration:
    """A recipe as a tree, and what a person should know of how it came about."""

    recipe: Tree
    places: dict[str, str] = field(default_factory=dict)  # recipe key → the old key that said it
    notes: list[str] = field(default_factory=list)  # what changed, one line each
    dropped: list[str] = field(default_factory=list)  # old keys that AscendFactory decides

    def put(self, path: str, value: Any, place: str = "") -> None:
        """Sets a dotted recipe key.

        Args:
            place: the old key that says it.
        """
        *groups, last = path.split(".")
        holder = self.recipe
        for group in groups:
            inner = holder.setdefault(group, {})
            holder = inner
        holder[last] = value
        if place:
            self.places[path] = place

    def note(self, en: str, zh: str) -> None:
        """Remembers one line."""
        self.notes.append(pick(en, zh))

    def apply(self, options: Tree, rules: Mapping[str, Rule], section: str) -> Tree:
        """Moves the options that have a recipe key; returns those that no rule knows.

        A value that cannot be converted is handed on as it is: the recipe's own check says what it should be.

        Args:
            section: where the options stand, with the dot at its end.
        """
        rest: Tree = {}
        for name, value in options.items():
            if name not in rules:
                rest[name] = value
                continue
            rule = rules[name]
            if rule is None:
                self.dropped.append(section + name)
            elif value is not None:
                key, convert = rule if isinstance(rule, tuple) else (rule, None)
                self.put(key, _converted(convert, value), section + name)
        return rest

    def keep(self, rest: Tree, known: dict[str, Any], section: str) -> None:
        """Hands options on to the back end under their own names.

        Args:
            known: the options that its parser accepts.

        Raises:
            UserError: the back end has no such option (with the nearest), or the value is of a wrong type.
        """
        given = {name: value for name, value in rest.items() if value is not None}
        for name, en, zh in check_options({name: value for name, value in given.items() if not isinstance(value, list)}, known):
            raise UserError(section + name, en, zh)
        if not given:
            return
        self.put("extra", given)
        self.places |= {f"extra.{name}": section + name for name in given}
        names = ", ".join(given)
        self.note(f"kept under extra, as the back end spells them: {names}", f"按后端写法保留在 extra：{names}")

    def close(self) -> None:
        """Tells in one line what was left out, section by section."""
        groups: dict[str, list[str]] = {}
        for place in self.dropped:
            section, _, name = place.removeprefix("backend_config.").partition(".")
            groups.setdefault(section, []).append(name)
        if groups:
            words = "; ".join(f"{section}: {', '.join(filter(None, names))}".rstrip(": ") for section, names in groups.items())
            self.note(f"decided by AscendFactory now, left out: {words}", f"现由 AscendFactory 决定，已删去：{words}")


def _converted(convert: Callable[[Any], Any] | None, value: Any) -> Any:
    try:
        return convert(value) if convert else value
    except (TypeError, ValueError):
        return value


def whole(options: Tree, name: str, default: int, section: str) -> int:
    """A whole number above 0, taken out of the options.

    Raises:
        UserError: it is something else.
    """
    value = options.pop(name, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(section + name, f"{value!r} is no whole number above 0, such as {default}", f"{value!r} 不是正整数，例如 {default}")
    return value


def one_of(options: Tree, name: str, words: dict[str, str], section: str) -> str:
    """The recipe's word for a choice, taken out of the options.

    Raises:
        UserError: it is none of them (the nearest is named first).
    """
    value = str(options.pop(name))
    if value not in words:
        near = nearest(value, words)
        valid = ", ".join(sorted(words, key=lambda word: word != near))
        raise UserError(
            section + name, f"'{value}' is not run by this back end; write one of {valid}", f"此后端不支持 '{value}'；可写 {valid}"
        )
    return words[value]


def options_of(sections: Tree, name: str) -> Tree:
    """The options of a section under backend_config; one that is null counts as not written.

    Raises:
        UserError: the section is a single value or a list.
    """
    return {key: value for key, value in mapping(sections.get(name), f"backend_config.{name}").items() if value is not None}


def required(options: Tree, name: str, section: str) -> Any:
    """The value of an option that has no default.

    Raises:
        UserError: it is not there (with the option that may have been meant).
    """
    if options.get(name):
        return options[name]
    guess = _near(name, options)
    hint, hint_zh = (f"; did you mean it by '{guess}'?", f"；'{guess}' 是否就是它？") if guess else ("", "")
    raise UserError(section + name, f"is missing{hint}", f"缺失{hint_zh}")


def stop_at_typo(names: Iterable[str], known: Iterable[str], section: str) -> None:
    """Of options that are left out anyway: one that is nearly the name of another is a slip of the pen.

    Raises:
        UserError: naming the option that was meant.
    """
    for name in names:
        if guess := _near(name, known):
            raise UserError(section + name, f"no such option; did you mean {guess}?", f"没有此选项；是否为 {guess}？")


def _near(name: str, known: Iterable[str]) -> str | None:
    """The known option of the same group that differs by a letter or two."""
    group, _, last = name.rpartition(".")
    beside = {word.rpartition(".")[2]: word for word in known if word.rpartition(".")[0] == group and word != name}
    found = difflib.get_close_matches(last, beside, n=1, cutoff=0.85)
    return beside[found[0]] if found else None


def mapping(value: Any, place: str) -> Tree:
    """A section of options; an empty one where nothing or null is written.

    Raises:
        UserError: it is a single value or a list.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(
            place, f"is a section of options, not {value!r}; write 'option: value' lines under it", f"应为选项的映射，而不是 {value!r}"
        )
    return dict(value)


def flat(tree: Tree, prefix: str = "", leaves: Mapping[str, Any] | None = None) -> Tree:
    """Nested sections as dotted keys, without those that are null.

    Args:
        leaves: keys whose value stays a mapping.
    """
    found: Tree = {}
    for key, value in tree.items():
        path = prefix + key
        if value is None:
            continue
        if isinstance(value, dict) and not (leaves and path in leaves):
            found |= flat(value, f"{path}.", leaves)
        else:
            found[path] = value
    return found
