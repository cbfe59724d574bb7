"""The Lora extension's script: patches the layers again each time it is executed."""

import networks
from modules import script_callbacks

originals = networks.LoraPatches()
script_callbacks.on_model_loaded(networks.assign_network_names_to_compvis_modules)
script_callbacks.on_script_unloaded(originals.undo)
