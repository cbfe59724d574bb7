"""Pressing buttons of a WebUI's page without a browser: what the page sends to the server when a user clicks."""

from __future__ import annotations

from typing import Any

from live.client import Client


class Page:
    """The page of a running WebUI, every component as it is when the page has just been opened."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._config = client.request("/config")
        self._components = {component["id"]: component for component in self._config["components"]}

    def press(self, button: str, **fields: Any) -> list[Any]:
        """Press a button.

        Args:
            button: its text; of several with the same, the first.
            fields: label to value, spaces as underscores, of components that the button sends; others are as they were.

        Returns:
            What the server answers, one entry a component that it changes.

        Raises:
            ApiError: what runs on the server failed.
            LookupError: there is no such button or field.
        """
        number, dependency = self._find(button)
        inputs = [self._components[identity]["props"] for identity in dependency["inputs"]]
        left, data = {name.replace("_", " "): value for name, value in fields.items()}, []
        for props in inputs:
            data.append(left.pop(label) if (label := _label(props)) in left else props.get("value"))
        if left:
            raise LookupError(f"{button} does not send {sorted(left)}, but {sorted({_label(each) for each in inputs})}")
        body = {"fn_index": number, "data": data, "session_hash": "live"}
        return self._client.request("/run/predict", body)["data"]

    def _find(self, button: str) -> tuple[int, dict[str, Any]]:
        for number, dependency in enumerate(self._config["dependencies"]):
            if any(self._text(target) == button for target in dependency["targets"]):
                return number, dependency
        raise LookupError(f"the page has no button {button!r}")

    def _text(self, target: int | list[Any]) -> Any:
        """Of a component that something happens to; older gradio names the event elsewhere. The page has none."""
        identity = target[0] if isinstance(target, list) else target
        return self._components.get(identity, {"props": {}})["props"].get("value")


def _label(props: dict[str, Any]) -> str:
    return str(props.get("label") or "").strip()
