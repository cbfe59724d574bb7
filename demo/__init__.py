"""The main job outside the WebUI: a small trained model in full precision and in 8 bits, side by side."""

import os

# Everything needed is here: nothing is to be fetched, and the libraries need not remark on what they lack.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
