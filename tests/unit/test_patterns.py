"""Patterns for names of layers: they find what Python's regular expressions find, and never take long."""

from __future__ import annotations

import re

import pytest
from helpers import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

from lib_fp8 import DEFAULT_KEEP, PatternError, patterns
from lib_fp8.patterns import MOST_PATTERNS, MOST_STEPS, Name, Pattern, check_patterns

NAMES = [
    "time_embed.0",
    "input_blocks.0.0",
    "input_blocks.10.0.emb_layers.1",
    "input_blocks.4.1.transformer_blocks.0.attn1.to_q",
    "middle_block.1.transformer_blocks.9.attn2.to_out.0",
    "output_blocks.8.1.proj_in",
    "out.2",
    "joint_blocks.23.x_block.attn.qkv",
    "x_embedder.proj",
    "transformer.text_model.encoder.layers.11.self_attn.out_proj",
    "down_blocks.0.motion_modules.0.temporal_transformer.transformer_blocks.0.attention_blocks.0.to_q",
    "middle_block.1.hyper_k.0.linear",
    "",
    "A_1.b\n",
]
ORDINARY = [
    *DEFAULT_KEEP,
    *("attn2", r"^output_blocks\.8", r"(attn1|attn2)\.to_[qkv]", r"\.\d+\.", r"input_blocks\.([0-9]|10)\.", "attn|out"),
    *(
        r"to_(k|v)$",
        r"^a{1,2}\. (?:to_q) x",
        ".*",
        "(a|b)+c",
        r"^output_blocks\.(3|4)\.\d+",
        "(ab){2}",
        "(a+){2,4}",
        "",
    ),
    *(r"^(?!.*attn)", r"attn(?=2)", r"(?<=to_)q", r"(?<!hyper_)k", "(?i)ATTN", r"(?i:ATTN)1", r"\bto_", r"(?P<n>\d)$"),
    *(
        r"\.hyper_[kv]\.",
        r"output.*attn.*to_k",
        r"^input_blocks\.\d+?\.1\.",
        r"[^a-z_.\d]",
        r"\w+\.?\w+$",
        r"\Aout",
        r"\Z",
    ),
]
ENDLESS = ["(.|..)+!", "(a?a)+!", "(a{1,2})+!", "^(?:.?){200}!", "^(.|.)*!", "(?=(.|..)+!)", "(?:(?:a|b)|(?:a|.))+!"]
ENDLESS += [
    r".*.*.*.*.*.*.*!",
    "(?:.?.?.?.?)+!",
    "(?:.+?)(?:.+?)(?:.+?)(?:.+?)(?:.+?)!",
    r"^(\w+\s?)*!",
    "(a+)+!",
    r"(x+x+)+y",
]

CHARACTERS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", r"\d", r"\w", r"\W", "[a-b.]"])
PLACES = st.sampled_from(["^", "$", r"\b", r"\B", r"\A", r"\Z", "(?<=a)", "(?<!a.)", ""])
REPEATS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{2,}"])
AROUND = st.sampled_from(["(?=%s)", "(?!%s)"])


def _combined(inner):
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map("(?:{})".format),
        st.tuples(inner, REPEATS).map(lambda parts: "({}){}".format(*parts)),
        st.tuples(CHARACTERS, REPEATS).map("".join),
        st.tuples(AROUND, inner).map(lambda parts: parts[0] % parts[1]),
        inner.map("(?i:{})".format),
    )


EXPRESSIONS = st.recursive(st.one_of(CHARACTERS, PLACES), _combined, max_leaves=8)


@given(EXPRESSIONS, st.text("abA1._\n", max_size=7))
@settings(max_examples=400, deadline=None)
def test_finds_what_python_finds(text, name):
    """On names so short that Python's matcher ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "MOST_STEPS", 10**30)
        assert Pattern(text).is_in(Name(name)) == (re.search(text, name) is not None)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_ones_find_what_they_always_found(text):
    check_patterns([text])
    assert [Pattern(text).is_in(Name(name)) for name in NAMES] == [re.search(text, name) is not None for name in NAMES]


COUNTED = """
import sys
from hypothesis import given, settings, strategies as st
sys.path.insert(0, "tests")
from unit.test_patterns import ENDLESS, EXPRESSIONS
from lib_fp8 import PatternError
from lib_fp8.patterns import LONGEST_NAME, MOST_STEPS, Name, Pattern

def steps(pattern, name):
    calls = 0
    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name == "follow"
    searched = Name(name)
    sys.setprofile(count)
    try:
        pattern.is_in(searched)
    finally:
        sys.setprofile(None)
    return calls

def check(text, name):
    try:
        pattern = Pattern(text)
    except PatternError:
        return 0
    taken = steps(pattern, name)
    assert taken <= pattern.steps <= MOST_STEPS, (text, name, taken, pattern.steps)
    return taken

@given(EXPRESSIONS, st.text("ab1.", min_size=1, max_size=8), st.text("ab1.", max_size=3))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def any_expression(text, repeated, end):
    name = (repeated * LONGEST_NAME)[: LONGEST_NAME - len(end)] + end
    check("^" + text + "!", name)
    check(text, name)

any_expression()
print(sum(check(text, letter * LONGEST_NAME) > 100 for text in ENDLESS for letter in "ax"))
"""


def test_none_takes_more_steps_than_it_says():
    """In a process of its own, so that one that hangs is a failure."""
    assert int(run_python(COUNTED)) > 3, "some of those that are accepted had something to do"


ALL_ENDLESS = """
import sys
sys.path.insert(0, "tests")
from unit.test_patterns import ENDLESS, NAMES
from lib_fp8 import PatternError
from lib_fp8.patterns import Name, Pattern
for text in ENDLESS:
    try:
        print(any(Pattern(text).is_in(Name(name)) for name in [*NAMES, "a" * 200, "x" * 200]))
    except PatternError as error:
        print(error)
"""


def test_those_that_keep_python_busy_for_ever_are_answered_or_refused():
    for answer in run_python(ALL_ENDLESS).splitlines():
        assert answer == "False" or "repeats within repeats" in answer


@pytest.mark.parametrize(
    ("text", "why", "instead"),
    [
        (r"(a)\1", "refers to a group", "(attn1|attn2)"),
        (r"(?P<n>a)(?P=n)", "refers to a group", "(attn1|attn2)"),
        ("(a)?(?(1)b|c)", "condition", "(attn1|attn2)"),
        *((text, "repeats within repeats", "[a-z.]+") for text in (r"^(\w+\.?)+$x", "(a*)*", "((a+)b)*", "(?=(a+)+)")),
        ("(?:(a|b+)c)+", "repeats within repeats", "[a-z.]+"),
        ("((.{200}){200}){200}", "repeats within repeats", "[a-z.]+"),
        ("a" * 201, "longer than 200 characters", "several shorter patterns"),
        ("(" * 3000 + ")" * 3000, "longer than 200 characters", "several shorter patterns"),
        ("(?i)[\x00-\U0010ffff]", "range", "[a-z]"),
        (r"[\x00-\U0010ffff]", "range", "[a-z]"),
    ],
)
def test_what_is_not_allowed_is_named_with_what_to_write_instead(text, why, instead):
    with pytest.raises(PatternError) as caught:
        Pattern(text)
    assert repr(text[:80])[:-1] in str(caught.value)
    assert why in str(caught.value)
    assert instead in str(caught.value)


@pytest.mark.parametrize("text", ["(?>a)", "a++"])
def test_what_only_some_pythons_know_is_refused_by_all(text):
    with pytest.raises(PatternError, match=re.escape(repr(text))):
        Pattern(text)


@pytest.mark.parametrize("text", ["(", "*x", "[a", "x{4294967296}", "(?<=a+)b", "(?L)a", "(?(1)a|b)"])
def test_what_python_cannot_compile_is_refused(text):
    with pytest.raises(PatternError, match="no valid regular expression"):
        Pattern(text)


def test_too_many_are_refused():
    check_patterns(["x"] * MOST_PATTERNS)
    with pytest.raises(PatternError, match=f"{MOST_PATTERNS} are allowed"):
        check_patterns(["x"] * (MOST_PATTERNS + 1))


def test_many_that_are_slow_are_refused():
    slow = "^.*.*.*.*.*.*x"
    fast_enough = MOST_STEPS // Pattern(slow).steps
    check_patterns([slow] * fast_enough)
    with pytest.raises(PatternError, match="too long together"):
        check_patterns([slow] * (fast_enough + 1))
