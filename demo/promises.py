"""What the embedded model's figures must be, so that 8-bit weights can be recommended."""

from __future__ import annotations

from demo.experiment import Result
from demo.variants import FULL_PRECISION

FOLLOWING = 0.95
FOLLOWING_LOST = 0.01
LORA_KEPT = 0.98
INT8_OVER_THE_WEBUI = 8.0
"""dB of median PSNR that int8 is above the WebUI's own conversion."""


def broken_promises(result: Result) -> list[str]:
    """A sentence for each figure that is not as good as promised; none if all is well."""
    broken = []
    full = result.row(FULL_PRECISION)
    if full.following is None or full.following < FOLLOWING:
        broken.append(f"full precision: prompt following {full.following}, at least {FOLLOWING:.0%} wanted")
    for name in ("float8_e4m3fn", "int8"):
        row = result.row(name)
        if row.following is not None and full.following is not None:
            lost = full.following - row.following
            if abs(lost) > FOLLOWING_LOST + 1e-9:
                broken.append(f"{name}: prompt following {row.following:.1%}, full precision {full.following:.1%}")
        for label, effect in row.effects.items():
            for what, kept in (("the judge's reading", effect.reading), ("cosine of latents", effect.cosine)):
                if kept is None or not kept >= LORA_KEPT:  # NaN is not good enough either
                    broken.append(f"{name}: LoRA {label}: {what} {kept}, at least {LORA_KEPT} wanted")
    ahead = result.row("int8").median_psnr - result.row("as the WebUI does it").median_psnr
    if not ahead >= INT8_OVER_THE_WEBUI:
        broken.append(f"int8 is {ahead:.1f} dB above the WebUI's own conversion, {INT8_OVER_THE_WEBUI:.0f} wanted")
    return broken
