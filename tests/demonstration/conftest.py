"""The demo's libraries come with the current torch only; with another one its tests are skipped, visibly."""

import importlib.util

import pytest

NEEDED = ("diffusers", "transformers", "skimage", "scipy", "jinja2")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if missing else []


def pytest_report_header():
    return [f"tests/demonstration: skipped, without {', '.join(missing)}"] if missing else []


@pytest.fixture(scope="session")
def pipeline():
    """The embedded model."""
    from demo.loading import load_pipeline
    from demo.model import CHECKPOINT

    return load_pipeline(CHECKPOINT)
