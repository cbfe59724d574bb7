"""Live tests: a real WebUI, started on the CPU on a throw-away data folder, used through its API and its page.

    pytest tests/live --webui DIR --webui-python PYTHON [--extensions DIR]

Most tests use the embedded model and its networks. Checkpoints of the other kinds are made by the WebUI's own classes
when they are first needed, and kept in pytest's cache. A test whose other extension is missing in the folder of
extensions is skipped and says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from live.client import ApiError, Client
from live.guests import EXTENSIONS, Stage, write_files
from live.installation import Installation
from live.models import Models
from live.recipe import FULL_SIZE
from live.webui import EXTENSION, PLAIN_PRECISION, StartError, WebUI, prepare_data

START = "shapes-sd1"
"""The embedded model: coloured shapes of 64 x 64 pixels."""


def pytest_addoption(parser):
    group = parser.getgroup("live", "tests against a real WebUI")
    group.addoption("--webui", metavar="DIR", help="folder of an installed AUTOMATIC1111 WebUI")
    group.addoption("--webui-python", metavar="FILE", help="Python that can run it (default: its venv)")
    group.addoption("--extensions", metavar="DIR", help="checkouts of other extensions, each in the folder of its name")


def pytest_collection_modifyitems(items):
    """Tests on the shared WebUI come first, then what is compared with it, so that it is started once."""

    def rank(item):
        own = "start" in item.fixturenames or "shared_webui" not in item.fixturenames
        return own, "enabled_later" not in item.fixturenames

    here = [item for item in items if Path(__file__).parent in item.path.parents]
    ordered = iter(sorted(here, key=rank))
    items[:] = [next(ordered) if item in here else item for item in items]


@pytest.fixture(scope="session")
def installation(request) -> Installation:
    """The WebUI to be tested; without one, the test is skipped."""
    if (folder := request.config.getoption("--webui", None)) is None:
        pytest.skip("needs a real WebUI: pytest tests/live --webui DIR --webui-python FILE")
    folder = Path(folder).resolve()
    python = request.config.getoption("--webui-python") or folder / "venv/bin/python"
    return Installation(folder, Path(python).absolute(), request.config.cache.mkdir("webui-bytecode"))


@pytest.fixture(scope="session")
def models(request, installation) -> Models:
    """The embedded model, and random ones of the other kinds."""
    return Models(installation, request.config.cache.mkdir("webui-checkpoints"))


@pytest.fixture(scope="session")
def full_size(models) -> Path:
    """The checkpoint of SD1.5 in its real size."""
    return models.full_size()


@pytest.fixture(scope="session")
def other_extension(request):
    """``other_extension(name)`` gives the folder of another extension; the test is skipped if it is missing."""

    def find(name: str) -> Path:
        folder = request.config.getoption("--extensions", None)
        if folder is None or not (Path(folder) / name).is_dir():
            pytest.skip(f"needs {name}: --extensions DIR")
        return Path(folder).resolve() / name

    return find


class _Rack:
    """At most one running WebUI: asking for another kind stops the one that runs."""

    def __init__(self, installation: Installation, models: Models, new_folder):
        self._installation = installation
        self._models = models
        self._new_folder = new_folder
        self._running: WebUI | None = None
        self._key: object = None

    def start(self, flags=PLAIN_PRECISION, checkpoint=START, extensions=(), **settings) -> WebUI:
        self.stop()
        settings = {"sd_model_checkpoint": f"{checkpoint}.safetensors", **settings}
        data = prepare_data(self._new_folder(), self._models, settings, extensions)
        self._running = WebUI(self._installation, data, flags)
        return self._running

    def shared(self, *extensions: Path) -> WebUI:
        if self._running is None or self._key != extensions:
            self.start(extensions=extensions)
            self._key = extensions
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            running, self._running, self._key = self._running, None, None
            running.stop()


@pytest.fixture(scope="session")
def rack(installation, models, tmp_path_factory) -> Iterator[_Rack]:
    rack = _Rack(installation, models, lambda: tmp_path_factory.mktemp("webui", numbered=True))
    yield rack
    rack.stop()


@pytest.fixture
def start(rack):
    """``start(flags, checkpoint, **settings)`` starts a WebUI of its own for this test and gives it."""
    yield rack.start
    rack.stop()


@pytest.fixture
def start_if_able(start):
    """``start_if_able(work, flags, ...)`` starts one, and gives what work makes of it while FP8 weight is off.

    The test is skipped if that fails without the extension too.
    """

    def give(work, *args, **kwargs):
        try:
            return work(start(*args, **kwargs))
        except (StartError, ApiError):
            try:
                work(start(*args, **kwargs, disabled_extensions=[EXTENSION]))
            except (StartError, ApiError) as error:
                pytest.skip(f"this WebUI cannot do it, without {EXTENSION} too: {str(error).splitlines()[-1][:300]}")
            raise

    return give


@pytest.fixture(scope="module")
def bare(installation, models, tmp_path_factory) -> Iterator[WebUI]:
    """A WebUI beside the shared one, without the extension: whether it can do what a test asks for."""
    settings = {"sd_model_checkpoint": f"{START}.safetensors", "disabled_extensions": [EXTENSION]}
    data = prepare_data(tmp_path_factory.mktemp("bare", numbered=True), models, settings)
    running = WebUI(installation, data, PLAIN_PRECISION)
    yield running
    running.stop()


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


@pytest.fixture(scope="session")
def guest_files(full_size, tmp_path_factory) -> Path:
    """Files for AnimateDiff and ControlNet."""
    return write_files(tmp_path_factory.mktemp("guests"), full_size)


_stages: dict[str, Stage] = {}


@pytest.fixture
def stage(rack, other_extension, request, tmp_path_factory) -> Stage:
    """A WebUI with AnimateDiff and ControlNet on a checkpoint of real size; the test says which settings it needs."""
    extensions = [*map(other_extension, EXTENSIONS)]
    files = request.getfixturevalue("guest_files")
    running = rack.shared(*extensions)
    url = running.client.url
    if url not in _stages:
        _stages[url] = Stage(running, files, tmp_path_factory.mktemp("latents"))
    running.client.set(sd_model_checkpoint=f"{FULL_SIZE}.safetensors")
    return _stages[url]


@pytest.fixture
def console(shared_webui):
    """A context that gives a function for what the console said since its beginning."""

    @contextlib.contextmanager
    def since_now():
        position = len(shared_webui.log())
        yield lambda: shared_webui.log()[position:]

    return since_now
