"""Callbacks: those for the UI to come and for unloading run last one first."""

from collections import defaultdict

callbacks = defaultdict(list)


def _registrar(name):
    return lambda callback: callbacks[name].append(callback)


on_model_loaded = _registrar("model_loaded")
on_ui_settings = _registrar("ui_settings")
on_before_ui = _registrar("before_ui")
on_infotext_pasted = _registrar("infotext_pasted")
on_app_started = _registrar("app_started")
on_script_unloaded = _registrar("script_unloaded")


def run(name, *args):
    order = reversed if name in ("before_ui", "script_unloaded") else list
    for callback in order(list(callbacks[name])):
        callback(*args)


def model_loaded_callback(sd_model):
    run("model_loaded", sd_model)


def clear_callbacks():
    callbacks.clear()
