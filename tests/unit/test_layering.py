"""Who may import whom: the core needs no WebUI, and dependencies point downwards."""

from __future__ import annotations

import ast

import pytest
from helpers import ROOT, run_python

LEVELS = (
    {"scripts"},
    {"webui", "cli", "__main__"},
    {"lib_fp8"},  # the public names, for those who use the library
    {"convert", "merge", "peak"},
    {"report"},
    {"compute", "policy", "source"},
    {"qweight"},
    {"quantize", "branch", "patterns"},
    {"formats"},
    {"capability", "checkpoint"},
)
"""From the top; a module may import from its own level and from those below."""

LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
PACKAGE = ROOT / "lib_fp8"
CORE = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if "webui" not in path.relative_to(PACKAGE).parts and path.name != "__main__.py"
)
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
FLOORS = ("tools", "demo", "lib_fp8")
"""Folders from the top; what users run in the WebUI lies at the bottom and needs nothing of the others."""
WEBUI_ONLY = ("modules", "gradio", "networks", "fastapi")


def part_of(module: str) -> str:
    """The part of the library that a dotted module name belongs to."""
    parts = module.split(".")
    return "lib_fp8" if parts == ["lib_fp8"] else parts[1]


def owner(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "scripts" if parts[0] == "scripts" else part_of(".".join(parts).removesuffix(".__init__"))


def imports(path, tree=None):
    """Dotted names of all modules that a file imports, wherever in it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = ROOT.joinpath(*base.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                yield f"{base}.{alias.name}" if is_module else base


def complaints(path, tree=None):
    own = LEVEL[owner(path)]
    parts = [part_of(module) for module in imports(path, tree) if module.split(".")[0] == "lib_fp8"]
    return [f"{owner(path)} imports {part}" for part in parts if LEVEL[part] < own]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies_point_downwards(path):
    assert owner(path) in LEVEL, "a new module: give it a level"
    assert complaints(path) == []


@pytest.mark.parametrize("floor", range(len(FLOORS)), ids=FLOORS)
def test_folders_need_only_those_below(floor):
    above = {*FLOORS[:floor], "tests", "run"}
    for path in (ROOT / FLOORS[floor]).rglob("*.py"):
        assert [module for module in imports(path) if module.split(".")[0] in above] == [], path


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("qweight.py", "from lib_fp8 import compute"),
        ("qweight.py", "from lib_fp8 import QuantWeight"),
        ("qweight.py", "import lib_fp8.policy as p"),
        ("qweight.py", "from . import report"),
        ("policy.py", "def f():\n    from .convert import convert_model"),
        ("report.py", "from lib_fp8.convert import convert_model"),
        ("formats/int8.py", "from ..quantize import pack"),
        ("convert.py", "import lib_fp8.webui.panel"),
        ("capability.py", "from lib_fp8.formats.base import Format"),
    ],
)
def test_an_import_upwards_is_found(file, line):
    assert len(complaints(PACKAGE / file, ast.parse(line))) == 1


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if owner(path) not in ("scripts", "webui")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_core_names_no_webui_module(path):
    assert [module for module in imports(path) if module.split(".")[0] in WEBUI_ONLY] == []


def test_every_core_module_imports_alone_without_a_webui():
    """Each in an interpreter of its own state: all that is lib_fp8 is forgotten in between."""
    code = f"""
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {WEBUI_ONLY!r}:
            raise ImportError(f"{{name}} is not here, said the test")

sys.meta_path.insert(0, Blocked())
for blocked in ("modules", "gradio", "modules.shared"):
    try:
        importlib.import_module(blocked)
    except ImportError as error:
        assert "said the test" in str(error)
    else:
        raise AssertionError(f"{{blocked}} was not blocked")
for name in {CORE!r}:
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == "lib_fp8"]:
        del sys.modules[loaded]
    importlib.import_module(name)
    print(name)
"""
    assert run_python(code).split() == CORE
    assert "lib_fp8.convert" in CORE
    assert "lib_fp8.formats.int8" in CORE
