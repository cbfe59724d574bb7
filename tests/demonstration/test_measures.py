"""The figures, against what follows from their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import lib_fp8
from demo import measures


def test_psnr_of_a_known_error():
    black = np.zeros((2, 8, 8, 3), np.uint8)
    off = black.copy()
    off[1] += 5
    assert measures.psnr(black, off) == [math.inf, pytest.approx(20 * math.log10(255 / 5))]


def test_ssim_of_the_same_and_of_another_picture():
    random = np.random.default_rng(0)
    a, b = random.integers(0, 256, (2, 1, 32, 32, 3), dtype=np.uint8)
    assert measures.ssim(a, a) == [1.0]
    assert measures.ssim(a, b)[0] < 0.1


def test_strength_is_the_length_in_the_wanted_direction():
    a = torch.tensor([3.0, 4.0])
    assert measures.strength(a, a / 10) == pytest.approx(0.1)
    assert measures.strength(a, a + torch.tensor([-4.0, 3.0])) == pytest.approx(1)


def test_cosine_and_signal_to_noise():
    a = torch.tensor([3.0, 4.0])
    assert measures.cosine(a, 2 * a) == pytest.approx(1)
    assert measures.cosine(a, torch.tensor([-4.0, 3.0])) == pytest.approx(0)
    assert measures.signal_to_noise(a, a) == math.inf
    assert measures.signal_to_noise(a, a * 0.9) == pytest.approx(20)


def test_bytes_of_plain_and_8_bit_weights():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16, bias=False))
    assert measures.stored_bytes(model) == 4 * (64 * 32 + 32 + 32 * 16)
    lib_fp8.convert_model(model, lib_fp8.Policy(format="int8", keep=()))
    assert measures.stored_bytes(model) == 64 * 32 + 4 * 32 + 4 * 32 + 32 * 16 + 4 * 16


def test_peak_counts_what_lives_at_a_time():
    model = nn.Linear(4, 4, bias=False)

    def work():
        first = torch.zeros(1000)
        del first
        both = torch.zeros(500), torch.zeros(700)
        return both[0].view(-1)[:3]

    assert measures.peak_bytes(model, work) == 4 * 16 + 4 * 1200


def test_peak_counts_no_weight_twice():
    model = nn.Linear(64, 32, bias=False)
    x = torch.zeros(1, 64)
    assert measures.peak_bytes(model, lambda: model(x)) == 4 * 64 * 32 + 4 * 32


def test_peak_forgets_weights_that_were_replaced():
    model = nn.Linear(64, 32, bias=False)

    def work():
        model.to(torch.float64)
        model.to(torch.float16)

    assert measures.peak_bytes(model, work) == (4 + 8) * 64 * 32


def test_peak_sees_inside_an_8_bit_weight():
    model = nn.Linear(256, 256, bias=False)
    lib_fp8.convert_model(model, lib_fp8.Policy(format="int8", keep=()))
    peak = measures.peak_bytes(model, lambda: model(torch.zeros(1, 256)))
    assert peak >= measures.stored_bytes(model) + 4 * 256 * 256  # the weight in float32, for as long as it is used
