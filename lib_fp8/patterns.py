"""Patterns for the names of layers: Python's regular expressions, matched so that they cannot hang.

Python's own matcher tries one way after the other, and nothing can interrupt it: ``(.|..)+!`` takes longer than anyone
waits. Such a pattern may come with an infotext that somebody pastes. Here all ways are followed side by side
(K. Thompson, Regular expression search algorithm, CACM 11, 1968), so the time is at most proportional to the length of
the name times the size of the pattern. Python's parser reads it; what cannot be followed in this way is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

try:
    from re import _constants as _codes  # type: ignore[attr-defined]
    from re import _parser as _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as _codes
    import sre_parse as _parser

_LARGEST = 2000
"""States that all patterns of a list may have together; one for each character of a plain pattern."""
_REMEMBERED = 4096
"""Steps that a pattern remembers, so that it is quick for names that resemble each other."""
_ALLOWED = "Text, ., [...], |, (...), *, +, ?, {n,m}, ^, $ and \\b can be used."


class PatternError(ValueError):
    """A pattern for layers to be kept cannot be used; the message names it and says why."""


class _State(NamedTuple):
    """One place in a pattern.

    Attributes:
        holds: ``(character before, character here) -> bool``, None at the ends of the name: whether it can be passed.
        consumes: whether passing it takes the character here.
        following: states after it.
    """

    holds: Callable[[str | None, str | None], bool]
    consumes: bool
    following: tuple[int, ...]


_FOUND = 0
"""The state of a pattern that was found."""


class Pattern:
    """A pattern that is looked for in names.

    Args:
        text: as Python's ``re`` has it, without references to groups, looking ahead or behind, atomic groups and
            possessive repeats.

    Raises:
        PatternError: it is no regular expression, or one of those that are left out, or too long.
    """

    def __init__(self, text: str):
        self.text = text
        self._states: list[_State] = [_State(_always, False, ())]
        self._steps: dict[tuple[frozenset[int], str | None, str | None], frozenset[int] | None] = {}
        try:
            re.compile(text)
            parsed = _parser.parse(text)
            self._ignores_case = _only_case(parsed.state.flags & ~re.UNICODE)
            self._start = self._sequence(parsed, _FOUND)
        except _LeftOutError as error:
            raise PatternError(f"{text[:80]!r} cannot be used: {error}. {_ALLOWED}") from None
        except (re.error, OverflowError, RecursionError) as error:
            raise PatternError(f"{text[:80]!r} is no valid regular expression: {error}") from None

    @property
    def size(self) -> int:
        """Number of states."""
        return len(self._states)

    def found_in(self, name: str) -> bool:
        """Whether ``re.search`` would find the pattern in a name."""
        reached: frozenset[int] = frozenset()
        before: str | None = None
        for here in (*name, None):
            key = reached, before, here
            behind = self._steps[key] if key in self._steps else self._step(*key)
            if len(self._steps) < _REMEMBERED:
                self._steps[key] = behind
            if behind is None:
                return True
            reached, before = behind, here
        return False

    def _step(self, reached: frozenset[int], before: str | None, here: str | None) -> frozenset[int] | None:
        """The states behind the character here, None if the pattern is found."""
        todo, seen = [self._start, *reached], set()
        behind: set[int] = set()
        while todo:
            number = todo.pop()
            if number == _FOUND:
                return None
            state = self._states[number]
            if number in seen or not state.holds(before, here):
                continue
            seen.add(number)
            if state.consumes:
                behind.update(state.following)
            else:
                todo += state.following
        return frozenset(behind)

    def _add(self, holds: Callable[..., bool], consumes: bool, *following: int) -> int:
        if len(self._states) >= _LARGEST:
            raise _LeftOutError("it is too long")
        self._states.append(_State(holds, consumes, following))
        return len(self._states) - 1

    def _sequence(self, parsed: Iterable[Any], after: int) -> int:
        """Enter a sequence that leads to a state, and return its first state."""
        for code, argument in reversed(list(parsed)):
            after = self._entered(code, argument, after)
        return after

    def _entered(self, code: Any, argument: Any, after: int) -> int:
        if code is _codes.BRANCH:
            return self._add(_always, False, *(self._sequence(way, after) for way in argument[1]))
        if code is _codes.SUBPATTERN:
            _, added, removed, inner = argument
            if added or removed:
                raise _LeftOutError("it has flags for a part of it")
            return self._sequence(inner, after)
        if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT):
            least, most, inner = argument
            return self._repeated(least, most, inner, after)
        if code is _codes.AT:
            if argument not in _PLACES:
                raise _LeftOutError(f"{str(argument).lower()} is unknown")
            return self._add(_PLACES[argument], False, after)
        return self._add(_character(code, argument, self._ignores_case), True, after)

    def _repeated(self, least: int, most: Any, inner: Any, after: int) -> int:
        if most is _codes.MAXREPEAT:
            loop = self._add(_always, False)
            self._states[loop] = _State(_always, False, (self._sequence(inner, loop), after))
            first = loop
        else:
            first = after
            for _ in range(most - least):
                first = self._add(_always, False, self._sequence(inner, first), after)
        for _ in range(least):
            before = first
            first = self._sequence(inner, first)
            if first == before:  # nothing, however often
                break
        return first


class _LeftOutError(Exception):
    """What cannot be followed side by side."""


def _only_case(flags: int) -> bool:
    if flags & ~re.IGNORECASE:
        raise _LeftOutError("it has flags other than (?i)")
    return bool(flags)


def _always(before: str | None, here: str | None) -> bool:
    return True


def _at_beginning(before: str | None, here: str | None) -> bool:
    return before is None


def _at_end(before: str | None, here: str | None) -> bool:
    return here is None


def _is_word(character: str | None) -> bool:
    return character is not None and (character.isalnum() or character == "_")


_PLACES: dict[Any, Callable[[str | None, str | None], bool]] = {
    _codes.AT_BEGINNING: _at_beginning,
    _codes.AT_BEGINNING_STRING: _at_beginning,
    _codes.AT_END: _at_end,
    _codes.AT_END_STRING: _at_end,
    _codes.AT_BOUNDARY: lambda before, here: _is_word(before) != _is_word(here),
    _codes.AT_NON_BOUNDARY: lambda before, here: _is_word(before) == _is_word(here),
}
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    _codes.CATEGORY_DIGIT: str.isdecimal,
    _codes.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    _codes.CATEGORY_SPACE: str.isspace,
    _codes.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    _codes.CATEGORY_WORD: _is_word,
    _codes.CATEGORY_NOT_WORD: lambda character: not _is_word(character),
}
_LEFT_OUT = {
    "ASSERT": "it looks ahead or behind",
    "ASSERT_NOT": "it looks ahead or behind",
    "GROUPREF": "it refers to a group",
    "GROUPREF_EXISTS": "it refers to a group",
    "ATOMIC_GROUP": "it has an atomic group",
    "POSSESSIVE_REPEAT": "it has a possessive repeat",
}


def _character(code: Any, argument: Any, ignores_case: bool) -> Callable[[str | None, str | None], bool]:
    """The test of a single character."""
    items = argument if code is _codes.IN else [(code, argument)]
    negated = items[0][0] in (_codes.NEGATE, _codes.NOT_LITERAL)
    tests = [_among(*item) for item in items if item[0] is not _codes.NEGATE]

    def holds(before: str | None, here: str | None) -> bool:
        if here is None:
            return False
        forms = {here, here.lower(), here.upper()} if ignores_case else {here}
        return any(test(form) for test in tests for form in forms) != negated

    return holds


def _among(code: Any, argument: Any) -> Callable[[str], bool]:
    if code in (_codes.LITERAL, _codes.NOT_LITERAL):
        return lambda character: ord(character) == argument
    if code is _codes.RANGE:
        return lambda character: argument[0] <= ord(character) <= argument[1]
    if code is _codes.ANY:
        return lambda character: character != "\n"
    if code is _codes.CATEGORY and argument in _CATEGORIES:
        return _CATEGORIES[argument]
    raise _LeftOutError(_LEFT_OUT.get(str(code), f"{str(code).lower()} is unknown"))


@functools.lru_cache(maxsize=256)
def pattern(text: str) -> Pattern:
    """The pattern of a text; those used last are kept. Raises PatternError."""
    return Pattern(text)


def check_patterns(texts: Iterable[str]) -> None:
    """Raise PatternError for the first pattern that cannot be used, or if all of them together are too long."""
    size = 0
    for text in texts:
        size += pattern(text).size
        if size > _LARGEST:
            raise PatternError(f"{text[:80]!r} is one too many: the patterns together are too long")
