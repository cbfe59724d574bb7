"""Stand-in for the WebUI's package; whoever imports it first says which generation it plays."""

generation = "1.10"  # or "1.6", "1.8", "1.9"


def at_least(minor):
    """Whether the generation played is 1.``minor`` or later."""
    return int(generation.split(".")[1]) >= minor
