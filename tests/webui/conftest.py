"""A fresh stand-in WebUI for each test, of each generation."""

from __future__ import annotations

import pytest

from webui.host import Host, fresh_modules
from webui.nets import ON, Nets

GENERATIONS = ("1.6", "1.8", "1.10")


def _host(generation, tmp_path):
    with fresh_modules(generation):
        yield Host(generation, tmp_path)


@pytest.fixture(params=GENERATIONS)
def host(request, tmp_path):
    """A WebUI of each generation; nothing is loaded yet."""
    yield from _host(request.param, tmp_path)


@pytest.fixture
def newest(tmp_path):
    """A WebUI of the newest generation, for what does not depend on it."""
    yield from _host("1.10", tmp_path)


@pytest.fixture
def sd1(host):
    """An SD1 model in 8 bits, UNet and text encoder."""
    host.checkpoint()
    return host.start(**ON)


@pytest.fixture
def nets(request, rng):
    """For the one host of the test."""
    return Nets(request.getfixturevalue(next(name for name in request.fixturenames if name in ("host", "newest"))), rng)
