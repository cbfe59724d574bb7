"""Scripts are executed by path; their folder leads sys.path only meanwhile."""

import importlib.util
import inspect
import sys
from collections import namedtuple
from pathlib import Path

from modules import errors, script_callbacks

AlwaysVisible = object()
ScriptClassData = namedtuple("ScriptClassData", ["script_class", "path", "basedir", "module"])
scripts_data = []
_current_basedir = ""


class Script:
    def title(self):
        raise NotImplementedError

    def show(self, is_img2img):
        return True


def basedir():
    return _current_basedir


def _execute(path):
    spec = importlib.util.spec_from_file_location(path.name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_scripts(paths):
    """Execute files, each in ``EXTENSION/scripts/``."""
    global _current_basedir
    scripts_data.clear()
    script_callbacks.clear_callbacks()
    path_before = sys.path
    for path in map(Path, paths):
        _current_basedir = str(path.parent.parent)
        sys.path = [_current_basedir, *sys.path]
        try:
            module = _execute(path)
            scripts_data.extend(
                ScriptClassData(found, str(path), _current_basedir, module)
                for found in vars(module).values()
                if inspect.isclass(found) and issubclass(found, Script)
            )
        except Exception as error:
            errors.display(error, f"Error loading script: {path.name}")
        finally:
            sys.path = path_before
            _current_basedir = ""


class ScriptRunner:
    """The scripts that act in every job; what one of them raises is shown and goes no further."""

    def __init__(self):
        made = [data.script_class() for data in scripts_data]
        self.alwayson = [script for script in made if script.show(False) is AlwaysVisible]

    def run(self, method, p, *args, **kwargs):
        for script in self.alwayson:
            if hasattr(script, method):
                try:
                    getattr(script, method)(p, *args, **kwargs)
                except Exception as error:
                    errors.display(error, f"Error running {method}: {script.title()}")
