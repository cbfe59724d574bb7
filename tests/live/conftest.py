"""Live tests: a real WebUI, started on the CPU on a throw-away data folder, used through its API and its page.

    pytest tests/live --webui DIR --webui-python PYTHON --checkpoints DIR

The folder of checkpoints may hold any of the small models named in ``START`` and in the tests (a .safetensors file,
with its .yaml beside it), and LoRAs in ``lora/``. A test whose checkpoint is missing is skipped and says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from live.client import Client
from live.webui import PLAIN_PRECISION, Installation, WebUI, prepare_data

START = "shapes-sd1"
"""A trained SD1 model for pictures of coloured shapes of 64 x 64 pixels; the one that most tests use."""


def pytest_addoption(parser):
    group = parser.getgroup("live", "tests against a real WebUI")
    group.addoption("--webui", metavar="DIR", help="folder of an installed AUTOMATIC1111 WebUI")
    group.addoption("--webui-python", metavar="FILE", help="Python that can run it (default: its venv)")
    group.addoption("--checkpoints", metavar="DIR", help="small checkpoints, with LoRAs in DIR/lora")


def pytest_collection_modifyitems(items):
    """Tests that start a WebUI of their own come last, so that the shared one is started once."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    first = sorted(here, key=lambda item: "start" in item.fixturenames)
    rest = iter(first)
    items[:] = [next(rest) if item in here else item for item in items]


@pytest.fixture(scope="session")
def installation(request) -> Installation:
    """The WebUI to be tested; without one, the test is skipped."""
    if (folder := request.config.getoption("--webui", None)) is None:
        pytest.skip("needs a real WebUI: pytest tests/live --webui DIR --webui-python FILE --checkpoints DIR")
    folder = Path(folder).resolve()
    python = request.config.getoption("--webui-python") or folder / "venv/bin/python"
    return Installation(folder, Path(python).absolute(), request.config.cache.mkdir("webui-bytecode"))


@pytest.fixture(scope="session")
def checkpoints(request) -> Path:
    """The folder of checkpoints."""
    if (folder := request.config.getoption("--checkpoints", None)) is None:
        pytest.skip("needs small checkpoints: --checkpoints DIR")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def need(checkpoints):
    """``need(name, ...)`` skips the test if one of these checkpoints or LoRAs (``lora/NAME``) is missing."""

    def check(*names: str) -> None:
        if missing := [name for name in names if not (checkpoints / f"{name}.safetensors").exists()]:
            pytest.skip(f"needs {', '.join(missing)} in {checkpoints}")

    return check


class _Rack:
    """At most one running WebUI: asking for another kind stops the one that runs."""

    def __init__(self, installation: Installation, checkpoints: Path, new_folder):
        self._installation = installation
        self._checkpoints = checkpoints
        self._new_folder = new_folder
        self._running: WebUI | None = None
        self._key: object = None

    def start(self, flags=PLAIN_PRECISION, checkpoint=START, **settings) -> WebUI:
        self.stop()
        names = [path.stem for path in self._checkpoints.glob("*.safetensors")]
        settings = {"sd_model_checkpoint": f"{checkpoint}.safetensors", **settings}
        data = prepare_data(self._new_folder(), self._checkpoints, names, settings)
        self._running = WebUI(self._installation, data, flags)
        return self._running

    def shared(self) -> WebUI:
        if self._running is None or self._key != "shared":
            self.start()
            self._key = "shared"
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            running, self._running, self._key = self._running, None, None
            running.stop()


@pytest.fixture(scope="session")
def rack(installation, checkpoints, need, tmp_path_factory) -> Iterator[_Rack]:
    need(START)
    rack = _Rack(installation, checkpoints, lambda: tmp_path_factory.mktemp("webui", numbered=True))
    yield rack
    rack.stop()


@pytest.fixture
def start(rack):
    """``start(flags, checkpoint, **settings)`` starts a WebUI of its own for this test and gives it."""
    yield rack.start
    rack.stop()


@pytest.fixture
def shared_webui(rack) -> WebUI:
    """The WebUI that tests share: plain settings, FP8 weight off when it started."""
    return rack.shared()


def reset(client: Client) -> None:
    """Bring all settings of the shared WebUI to what they were when it started."""
    if client.url not in _defaults:
        _defaults[client.url] = client.fp8_options()
    client.set(**_defaults[client.url], sd_model_checkpoint=f"{START}.safetensors")
    assert client.probe("checkpoint") == f"{START}.safetensors"


_defaults: dict[str, dict] = {}


@pytest.fixture
def webui(shared_webui) -> Client:
    """The client of the shared WebUI, all settings as they were when it started."""
    reset(shared_webui.client)
    return shared_webui.client


@pytest.fixture
def console(shared_webui):
    """A context that gives a function for what the console said since its beginning."""

    @contextlib.contextmanager
    def since_now():
        position = len(shared_webui.log())
        yield lambda: shared_webui.log()[position:]

    return since_now
