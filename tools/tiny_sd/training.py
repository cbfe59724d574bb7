"""One loop for every stage: optimizer, running average of the weights, progress on the console, resuming."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

SAVE_EVERY_SECONDS = 60


@dataclass(frozen=True)
class Stage:
    """How long and how fast a part is trained."""

    name: str
    steps: int
    rate: float
    flat: float = 0.0
    """Share of the steps with the full learning rate, before its cosine."""
    average: float = 0.995
    weight_decay: float = 0.0


def learning_rate(stage: Stage, step: int) -> float:
    """Warm-up over 20 steps, flat, then a half cosine to a hundredth."""
    progress = max(0.0, (step / stage.steps - stage.flat) / (1 - stage.flat))
    cosine = 0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2
    return stage.rate * min(1.0, (step + 1) / 20) * cosine


def train(
    stage: Stage,
    module: torch.nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    folder: Path,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Train the parameters of `module` that require gradients, and leave their running average in it.

    Args:
        stage: the plan.
        module: what is trained.
        loss_of: gives the loss of a step; it must draw all that is random from the step's number, so that a run that
            was interrupted goes on as if it had not been.
        folder: holds the state of every stage; one that is finished is loaded, not run again.
        scaler: keeps the gradients of a loss computed in float16 from vanishing. Its own state is not saved.
    """
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=stage.rate, betas=(0.9, 0.98), weight_decay=stage.weight_decay
    )
    averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    first, history = 0, []
    file = folder / f"{stage.name}.state"
    if file.exists():
        state = torch.load(file, weights_only=True)
        first, history, averages = state["step"], state["history"], state["averages"]
        optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["parameters"][name])
        print(f"{stage.name}: going on after step {first} of {stage.steps}", flush=True)

    def save(step: int) -> None:
        state = {
            "step": step,
            "history": history,
            "averages": averages,
            "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
            "optimizer": optimizer.state_dict(),
        }
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)

    start = saved = time.monotonic()
    recent = torch.zeros(())
    for step in range(first, stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, step)
        optimizer.zero_grad()
        loss = loss_of(step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        keep = min(stage.average, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, parameter in parameters.items():
                averages[name].lerp_(parameter, 1 - keep)
        recent += loss.detach()
        done = step + 1
        if done % 25 == 0 or done == stage.steps:
            history.append((done, recent.item() / ((done - 1) % 25 + 1)))
            recent.zero_()
            left = (time.monotonic() - start) / (done - first) * (stage.steps - done)
            print(
                f"{stage.name}: step {done} of {stage.steps}, loss {history[-1][1]:.4f}, {left:.0f} s left", flush=True
            )
            if time.monotonic() - saved > SAVE_EVERY_SECONDS and done < stage.steps:
                save(done)
                saved = time.monotonic()
    if first < stage.steps:
        save(stage.steps)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(averages[name])
    (folder / f"{stage.name}.loss.json").write_text(json.dumps(history))
