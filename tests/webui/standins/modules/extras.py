"""The Checkpoint Merger."""

from pathlib import Path

import safetensors.torch

from modules import sd_models


def run_modelmerger(primary_model_name, secondary_model_name, multiplier, custom_name):
    """Weighted sum of two checkpoints, written beside the first."""
    theta_1 = sd_models.read_state_dict(sd_models.checkpoints_list[secondary_model_name].filename, map_location="cpu")
    primary = sd_models.checkpoints_list[primary_model_name].filename
    theta_0 = sd_models.read_state_dict(primary, map_location="cpu")
    for key in theta_0:
        if "model" in key and key in theta_1:
            theta_0[key] = (1 - multiplier) * theta_0[key] + multiplier * theta_1[key]
    output = Path(primary).with_name(f"{custom_name}.safetensors")
    safetensors.torch.save_file(theta_0, output)
    return output
