"""Replaced functions by who replaced them; a second replacement by the same one is refused."""

from collections import defaultdict

originals = defaultdict(dict)


def patch(key, obj, field, replacement):
    if (obj, field) in originals[key]:
        raise RuntimeError(f"patch for {field} is already applied")
    originals[key][obj, field] = getattr(obj, field)
    setattr(obj, field, replacement)
    return originals[key][obj, field]


def undo(key, obj, field):
    if (obj, field) not in originals[key]:
        raise RuntimeError(f"there is no patch for {field} to undo")
    setattr(obj, field, originals[key].pop((obj, field)))
