"""The UNet in use; counts how often it was asked for."""

applied = []


def apply_unet(option=None):
    applied.append(option)
