"""Everything is on the CPU, where autocast computes in bfloat16; with --precision half there is no autocast."""

import contextlib

import torch

from modules import at_least
from modules.shared_cmd_options import cmd_opts

cpu = device = torch.device("cpu")
dtype = torch.float16
dtype_unet = torch.float16
dtype_vae = torch.float32
collections = 0

if at_least(8):
    fp8 = False


def _half():
    return at_least(10) and cmd_opts.precision == "half"


def autocast():
    return contextlib.nullcontext() if _half() else torch.autocast("cpu", dtype=torch.bfloat16)


def cond_cast_unet(x):
    return x.to(torch.float16) if _half() else x


def get_optimal_device_name():
    return "cpu"


def torch_gc():
    global collections
    collections += 1
