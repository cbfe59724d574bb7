"""Patterns for names of layers: as Python's ``re`` finds them, and always in time."""

from __future__ import annotations

import re

import pytest
from helpers import ToyUNet, run_python
from hypothesis import given
from hypothesis import strategies as st

from lib_fp8 import DEFAULT_KEEP, PatternError
from lib_fp8.patterns import Pattern, check_patterns, pattern

NAMES = [name for name, _ in ToyUNet().named_modules() if name]
NAMES += ["input_blocks.4.1.transformer_blocks.0.attn2.to_q", "output_blocks.11.0.emb_layers.1", "x_embedder.proj"]
ORDINARY = [
    *DEFAULT_KEEP,
    *("attn2", r"^output_blocks\.8", r"(attn1|attn2)\.to_[qkv]", r"input_blocks\.([0-9]|10)\.", ".*", "(a|b)+c"),
    *(
        r"^output_blocks\.(3|4)\.\d+",
        "(ab){2}",
        "(a+){2,4}",
        r"\battn\d\b",
        "(?i)ATTN2",
        r"[^.]+\.proj$",
        r"to_k$|to_v$",
    ),
    *(r"input_blocks\.\d+\.\d+\.transformer_blocks\.\d+\.attn2", r"\.\d+?\.", r"\Ax_", r"1\Z"),
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_ones_are_found_as_python_finds_them(text):
    assert [Pattern(text).found_in(name) for name in NAMES] == [bool(re.search(text, name)) for name in NAMES]


ATOMS = st.sampled_from(
    ["a", "b", r"\.", "1", ".", "[ab]", "[^a]", r"\d", r"\w", r"\W", "[a-b1]", r"\b", r"\B", "^", "$"]
)
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, REPEATS).map(lambda two: f"(?:{two[0]}){two[1]}"),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.text("ab.1_B", min_size=1, max_size=8), st.booleans())
def test_any_is_found_as_python_finds_it(text, name, ignores_case):
    text = f"(?i){text}" if ignores_case else text
    assert Pattern(text).found_in(name) == bool(re.search(text, name))


def test_what_never_ends_in_python_ends_here():
    """In an interpreter of its own, so that a failure is no hang."""
    code = """
from lib_fp8.patterns import Pattern
for text in ("(.|..)+!", r"^(\\w+\\.?)+$x", "(a*)*!", "((a+)b?)*!", ".*.*.*.*.*.*!", "(a|a)*(a|a)*!", "(.{0,9}){9}!"):
    for length in (1, 40, 200):
        assert not Pattern(text).found_in("a" * length), text
    assert Pattern(text.rstrip("!")).found_in("aaaaaaaaa") or text.endswith("$x"), text
print("done")
"""
    assert run_python(code).strip() == "done"


@pytest.mark.parametrize("text", ["(", "*x", "[a", "x{4294967296}", "(" * 3000 + ")" * 3000])
def test_what_python_cannot_compile_is_refused(text):
    with pytest.raises(PatternError, match="no valid regular expression") as caught:
        Pattern(text)
    assert repr(text[:80]) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(?=(a+)+)", "looks ahead"),
        ("(?!a)", "looks ahead"),
        ("(?<=a)b", "ahead or behind"),
        (r"(a+)\1", "refers to a group"),
        ("(a)?b(?(1)c|d)", "refers to a group"),
        ("(?s)a", "flags"),
        ("(?i:a)", "flags"),
        ("x{5000}", "too long"),
        ("(((a{0,30}){0,30}){0,30}){0,30}", "too long"),
    ],
)
def test_what_cannot_be_followed_is_refused(text, reason):
    with pytest.raises(PatternError, match=reason) as caught:
        Pattern(text)
    assert repr(text) in str(caught.value)
    assert "can be used" in str(caught.value)


def test_all_patterns_together_have_a_limit():
    check_patterns(["attn2"] * 100)
    with pytest.raises(PatternError, match="together"):
        check_patterns(["attn2"] * 1000)


def test_it_is_quick_for_the_names_of_a_model():
    """Names that resemble each other take steps that are known already."""
    once = pattern(r"transformer_blocks\.\d+\.attn2\.to_[kv]$")
    for block in range(3):
        once.found_in(f"input_blocks.{block}.1.transformer_blocks.0.attn2.to_q")
    steps = len(once._steps)
    for _ in range(100):
        once.found_in("input_blocks.1.1.transformer_blocks.0.attn2.to_q")
    assert len(once._steps) == steps
