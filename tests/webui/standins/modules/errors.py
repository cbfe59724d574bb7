"""Errors are shown and kept."""

import sys

shown = []


def display(error, task):
    shown.append(f"{task}: {type(error).__name__}: {error}")


def report(message, *, exc_info=False):
    shown.append(f"{message}: {sys.exc_info()[1]!r}" if exc_info else message)
