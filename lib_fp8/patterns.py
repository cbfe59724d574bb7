"""Regular expressions for names of layers, matched in a way that always ends soon.

Python's own matcher tries one way through an expression after another: ``(.|..)+!`` keeps it busy for longer than
anyone waits, and nothing can interrupt it. Here all ways are followed at once: what is known after each part of the
expression is at which positions of the name one may be by then, as the bits of an integer. What single characters and
places (``\\d``, ``^``, ``\\b``) are is left to Python.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

try:
    from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_compile as _compiler
    import sre_constants as _constants
    import sre_parse as _parser

LONGEST_NAME = 200
"""Names of layers have fewer characters; a longer one takes longer in proportion."""
LONGEST_PATTERN = 200
MOST_PATTERNS = 100
MOST_STEPS = 20_000
"""For one name and all patterns of a list. A step is an operation on an integer that has a bit for each character."""

_LAST = 0xFFFF
"""Ranges of characters end here: Python takes long to prepare those of all characters, regardless of case."""


class PatternError(ValueError):
    """A pattern for layers is no valid regular expression, or one that is not allowed."""


class _NotAllowedError(Exception):
    """Something of Python's regular expressions that patterns may not have."""


class Name:
    """A name to be searched.

    Attributes:
        everywhere: the bits of all positions, that after the last character included.
    """

    def __init__(self, text: str):
        self.everywhere = (2 << len(text)) - 1
        self._text = text
        self._characters: dict[str, int] = {}
        for position, character in enumerate(text):
            self._characters[character] = self._characters.get(character, 0) | 1 << position
        self._found: dict[Callable[[str], Any], int] = {}

    def characters(self, fits: Callable[[str], bool]) -> int:
        """The bits of the positions before all characters that fit."""
        found = self._found.get(fits)
        if found is None:
            found = sum(places for character, places in self._characters.items() if fits(character))
            self._found[fits] = found
        return found

    def places(self, find: Callable[[str], Iterable[re.Match[str]]]) -> int:
        """The bits of the positions where something without a width is found."""
        found = self._found.get(find)
        if found is None:
            found = self._found[find] = sum(1 << match.start() for match in find(self._text))
        return found


class _Part(NamedTuple):
    """A part of an expression.

    Attributes:
        follow: ``(positions before, name) -> positions afterwards``, as bits.
        steps: how many operations that takes at most, in a name of ``LONGEST_NAME``.
    """

    follow: Callable[[int, Name], int]
    steps: int


class Pattern:
    """A regular expression of Python's, without what needs to know how it got where it is.

    Raises:
        PatternError: it is no valid expression, too long, or has something that is not allowed; says what to write.
    """

    def __init__(self, text: str):
        self.text = text
        if len(text) > LONGEST_PATTERN:
            raise self._refused(f"is longer than {LONGEST_PATTERN} characters. Write several shorter patterns instead")
        try:
            parsed = _parser.parse(text)
            self._whole = _sequence(parsed, parsed.state.flags, True)
            re.compile(text)
        except _NotAllowedError as error:
            raise self._refused(str(error)) from None
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise self._refused(f"is no valid regular expression: {error}") from None
        if self.steps > MOST_STEPS:
            raise self._refused(
                "has repeats within repeats, which may take too long. Write one repeat over all characters that may "
                "stand there instead, such as [a-z.]+ rather than ([a-z]+[.])+"
            )

    @property
    def steps(self) -> int:
        """How many operations a search takes at most."""
        return self._whole.steps

    def is_in(self, name: Name) -> bool:
        """Whether it is found anywhere in a name, as ``re.search`` finds it."""
        return self._whole.follow(name.everywhere, name) != 0

    def _refused(self, why: str) -> PatternError:
        return PatternError(f"{self.text[:80]!r} {why}")


get_pattern = functools.lru_cache(maxsize=1000)(Pattern)
"""``get_pattern(text) -> Pattern``. Raises PatternError."""


def check_patterns(texts: Iterable[str]) -> None:
    """Check a list of patterns that may come from anywhere, such as from an infotext that somebody pastes.

    Raises:
        PatternError: for the first one that cannot be used, or if there are too many.
    """
    texts = list(texts)
    if len(texts) > MOST_PATTERNS:
        raise PatternError(f"these are {len(texts)} patterns, and {MOST_PATTERNS} are allowed. Join some, such as a|b")
    if sum(get_pattern(text).steps for text in texts) > MOST_STEPS:
        raise PatternError(
            f"these {len(texts)} patterns may take too long together. Leave out repeats such as .* where they are not "
            "needed: a pattern is looked for everywhere in a name"
        )


def _sequence(nodes: Any, flags: int, forward: bool) -> _Part:
    """One part after the other. ``forward``: from the positions before a part to those after it; else the reverse."""
    parts = [_part(operator, argument, flags, forward) for operator, argument in nodes]
    if not forward:
        parts.reverse()

    def follow(positions: int, name: Name) -> int:
        for part in parts:
            positions = part.follow(positions, name)
            if not positions:
                break
        return positions

    return _Part(follow, 1 + sum(part.steps for part in parts))


def _part(operator: Any, argument: Any, flags: int, forward: bool) -> _Part:
    if operator not in _FOLLOWING:
        raise _NotAllowedError(
            "refers to a group, has a condition, an atomic group or a possessive repeat, none of which is allowed. "
            "Write out what may stand there instead, such as (attn1|attn2)"
        )
    return _FOLLOWING[operator](argument, flags, forward)


def _alone(operator: Any, argument: Any, flags: int) -> re.Pattern[str]:
    """What Python's matcher makes of one character or place."""
    state = _parser.State()
    state.flags = flags
    return _compiler.compile(_parser.SubPattern(state, [(operator, argument)]))


def _character(operator: Any, argument: Any, flags: int, forward: bool) -> _Part:
    if operator is _constants.IN and any(kind is _constants.RANGE and of[1] > _LAST for kind, of in argument):
        raise _NotAllowedError("has a range of more characters than any name has. Write a range such as [a-z] instead")
    alone = _alone(operator, argument, flags)
    fits = functools.lru_cache(maxsize=None)(lambda character: alone.match(character) is not None)

    def follow(positions: int, name: Name) -> int:
        fitting = name.characters(fits)
        return (positions & fitting) << 1 if forward else (positions >> 1) & fitting

    return _Part(follow, 1)


def _place(argument: Any, flags: int, forward: bool) -> _Part:
    find = _alone(_constants.AT, argument, flags).finditer

    def follow(positions: int, name: Name) -> int:
        return positions & name.places(find)

    return _Part(follow, 1)


def _alternatives(argument: Any, flags: int, forward: bool) -> _Part:
    parts = [_sequence(nodes, flags, forward) for nodes in argument[1]]

    def follow(positions: int, name: Name) -> int:
        return functools.reduce(int.__or__, (part.follow(positions, name) for part in parts))

    return _Part(follow, 1 + sum(part.steps for part in parts))


def _group(argument: Any, flags: int, forward: bool) -> _Part:
    _, added, removed, nodes = argument
    return _sequence(nodes, _compiler._combine_flags(flags, added, removed), forward)


def _repeat(argument: Any, flags: int, forward: bool) -> _Part:
    least, most, nodes = argument
    part = _sequence(nodes, flags, forward)

    def follow(positions: int, name: Name) -> int:
        for _ in range(least):  # what does not change any more, or has come to nothing, stays so
            before, positions = positions, part.follow(positions, name)
            if positions == before:
                break
        reached = new = positions
        for _ in range(most - least):
            new = part.follow(new, name) & ~reached
            if not new:
                break
            reached |= new
        return reached

    rounds = min(int(most), LONGEST_NAME + 3)  # each leads to a new position, but for those that end a loop
    return _Part(follow, 1 + rounds * part.steps)


def _around(wanted: bool, argument: Any, flags: int, forward: bool) -> _Part:
    """What must follow or come before a position, or must not."""
    direction, nodes = argument
    part = _sequence(nodes, flags, direction < 0)  # from everywhere to where such a thing ends, or begins

    def follow(positions: int, name: Name) -> int:
        there = part.follow(name.everywhere, name)
        return positions & (there if wanted else ~there)

    return _Part(follow, 1 + part.steps)


_FOLLOWING: dict[Any, Callable[[Any, int, bool], _Part]] = {
    **{
        operator: functools.partial(_character, operator)
        for operator in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)
    },
    _constants.AT: _place,
    _constants.BRANCH: _alternatives,
    _constants.SUBPATTERN: _group,
    _constants.MAX_REPEAT: _repeat,
    _constants.MIN_REPEAT: _repeat,
    _constants.ASSERT: functools.partial(_around, True),
    _constants.ASSERT_NOT: functools.partial(_around, False),
}
"""Part of an expression to what follows it; what is missing here is not allowed."""
