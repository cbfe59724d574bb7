"""Errors are shown and kept."""

shown = []


def display(error, task):
    shown.append(f"{task}: {type(error).__name__}: {error}")


def report(message):
    shown.append(message)
