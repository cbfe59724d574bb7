"""Components that only remember what they were made with; an unknown keyword is an error, as in gradio 3."""


class _Component:
    def __init__(self, value=None, *, label=None, elem_id=None, visible=True, **kwargs):
        if unknown := set(kwargs) - self.accepts:
            raise TypeError(f"{type(self).__name__} got unexpected keywords {unknown}")
        self.value, self.label, self.elem_id, self.visible = value, label, elem_id, visible
        self.kwargs = kwargs
        self.clicked = None

    accepts = frozenset()

    def click(self, fn, inputs=None, outputs=None, show_progress="full"):
        self.clicked = fn, inputs, outputs


class Textbox(_Component):
    accepts = frozenset({"lines"})


class Checkbox(_Component):
    pass


class Number(_Component):
    accepts = frozenset({"precision"})


class Dropdown(_Component):
    accepts = frozenset({"choices"})


class Radio(_Component):
    accepts = frozenset({"choices"})


class HTML(_Component):
    accepts = frozenset({"elem_classes"})


class Button(_Component):
    accepts = frozenset({"size", "scale", "variant"})


class Row:
    def __init__(self, *, variant="default", visible=True, elem_id=None, elem_classes=None, equal_height=True):
        self.elem_id = elem_id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


warnings: list[str] = []


def Warning(message):
    warnings.append(message)
