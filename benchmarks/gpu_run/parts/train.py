"""Speed of training: tokens/s, MFU and memory of a run beside other libraries, the gain of compiling, and steps of the
optimizer alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import machine
import torch
from device import Peak, in_turn, release
from libraries import LIBRARIES, CannotBuildError, Loss, Shape, drawn
from record import NOT_INSTALLED, SKIPPED
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from birthmark.trainer.config import OptimConfig, TrainerConfig
from birthmark.trainer.numerics import fp8_problem
from birthmark.trainer.optimizers.parameter_groups import parameter_groups
from birthmark.trainer.throughput import flops_per_token, peak_flops

from ..case import Case, Setting
from ..fit import fit, run_config
from ..models import GPT2_124M, LLAMA_1B, TINY, TINY_GPT2, Sized

#: Least model FLOPs utilisation of the largest model here, and with an accumulation of four micro-batches.
MFU, ACCUMULATED_MFU = 0.52, 0.55
GIB = 2**30


# ------------------------------------------------------------------------------------------------------------------
# Other libraries: the same model, batch, precision, optimizer and loop for all


class Trained:
    """The model of one library with its optimizer; :meth:`step` is one optimizer step of one micro-batch."""

    def __init__(self, model: nn.Module, losses: dict[str, Loss], batch: Tensor, compiled: bool) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.losses = {name: torch.compile(loss) if compiled else loss for name, loss in losses.items()}
        self.loss = next(iter(self.losses))

    def step(self) -> None:
        """Run forward, backward and the update."""
        with torch.autocast(self.batch.device.type, torch.bfloat16):
            loss = self.losses[self.loss](self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def choose_loss(self) -> None:
        """Choose the fastest of its losses; one that does not fit into the memory is skipped."""
        found: dict[str, float] = {}
        for name in list(self.losses):
            self.loss = name
            try:
                found[name] = in_turn({name: self.step}, self.batch.device, 2, 2)[name].seconds
            except torch.OutOfMemoryError:
                del self.losses[name]
            self.optimizer.zero_grad(set_to_none=True)
            release(self.batch.device)
        if not found:
            raise torch.OutOfMemoryError(f"a step of {len(self.batch)} × {self.batch.shape[1] - 1} tokens does not fit")
        self.loss = min(found, key=lambda name: found[name])

    def own_bytes(self) -> int:
        """Count the bytes of weights and of the optimizer's state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *states]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _against(sized: Sized, micro_batch: int, compiled: bool, setting: Setting) -> Iterator[dict[str, Any]]:
    shape, device = replace(sized.shape, micro_batch=micro_batch), torch.device(setting.device)
    table = f"{sized.name} beside other libraries, {'compiled' if compiled else 'eager'}, bf16"
    trained: dict[str, Trained] = {}
    for name, build in LIBRARIES.items():
        row = {"table": table, "library": name}
        try:
            model, losses = build(shape, device)
        except ImportError as error:
            yield row | {"status": NOT_INSTALLED, "note": str(error)}
            continue
        except CannotBuildError as error:
            yield row | {"status": SKIPPED, "note": str(error)}
            continue
        trained[name] = Trained(model, losses, shape.batch(device), compiled)
        trained[name].choose_loss()
    counts = {name: sum(p.numel() for p in one.model.parameters()) for name, one in trained.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the libraries built different models: {counts} parameters")
    found = in_turn({name: one.step for name, one in trained.items()}, device, 2 * setting.rounds, 2)
    ceiling = peak_flops(device, "bf16")
    for name, one in trained.items():
        peak = Peak(device)
        peak.start()
        one.step()
        above = peak.above()
        speed = shape.micro_batch * shape.seq_len / found[name].seconds
        flops = flops_per_token(sized.config(), counts[name], shape.seq_len)
        yield {
            "table": table,
            "library": name,
            "version": machine.version(name) or getattr(importlib.import_module(name), "__version__", ""),
            "loss": one.loss,
            "parameters": counts[name],
            "batch": f"{shape.micro_batch} × {shape.seq_len}",
            "ms": 1000 * found[name].seconds,
            "tokens/s": speed,
            "MFU": None if ceiling is None else speed * flops / ceiling,
            "ours over it": found[name].ratio,
            "quartiles": f"{found[name].low:.3f}–{found[name].high:.3f}",
            "peak, GiB": None if above is None else (above + one.own_bytes()) / GIB,
        }


# ------------------------------------------------------------------------------------------------------------------
# As a run does it


def training(shape: Shape, setting: Setting, accumulation: int = 1, **trainer: Any) -> TrainerConfig:
    """Return the settings for a few steps in bf16 on the device."""
    size = shape.micro_batch
    steps = {"max_steps": 4 if setting.tiny else 20, "micro_batch_size": size, "global_batch_size": size * accumulation}
    return TrainerConfig(**{**steps, "precision": "bf16", "device": setting.device, **trainer})


class Way(NamedTuple):
    """Fields of a run's config beside the precision and the batch."""

    compile: str
    accumulation: int = 1
    trainer: Mapping[str, Any] = MappingProxyType({})
    optim: Mapping[str, Any] = MappingProxyType({})
    autotune: bool = False
    """Let the compiler time several kernels for each product."""

    def __str__(self) -> str:
        """Describe it in words."""
        fields = (f"{name} {value}".replace(" True", "") for name, value in {**self.trainer, **self.optim}.items())
        more = [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        return ", ".join([f"compile {self.compile}", *more, *fields, *(["max-autotune"] if self.autotune else [])])


#: Fields that move fewer bytes in a step.
LEAN = {"trainer": {"residual": "bf16"}, "optim": {"clip_in_step": True, "state_dtype": "bf16"}}


def _run(sized: Sized, way: Way, wanted: float | None, setting: Setting) -> Iterator[dict[str, Any]]:
    row = {"table": "As a run trains, with Lightning's loop", "way": str(way)}
    trainer = training(sized.shape, setting, way.accumulation, compile=way.compile, **way.trainer)
    if trainer.precision == "fp8" and (problem := fp8_problem(torch.device(setting.device))):
        yield row | {"status": SKIPPED, "note": problem}
        return
    config = run_config(sized.config(), trainer, OptimConfig(**way.optim))
    with inductor_config.patch(max_autotune=way.autotune):
        found = fit(config, setting.device, 2 if setting.tiny else 8)
    yield {
        **row,
        "parameters": found.parameters,
        "batch": f"{way.accumulation} × {found.micro_batch_size} × {sized.shape.seq_len}",
        "ms": 1000 * found.step_s,
        "tokens/s": found.tokens_per_s,
        "MFU": found.mfu,
        "peak, GiB": None if found.peak_bytes is None else found.peak_bytes / GIB,
        "first step, s": found.first_step_s,
        **({} if wanted is None else setting.limit(found.mfu, wanted, at_most=False)),
    }


# ------------------------------------------------------------------------------------------------------------------
# A step of the optimizer alone

#: Ways of a step of AdamW, with the norm of all gradients and the clip at 1: torch's own parts first.
WAYS = {
    "norm, clip, step": OptimConfig(),
    "clip in the step": OptimConfig(clip_in_step=True),
    "state in bf16": OptimConfig(state_dtype="bf16"),
    "both": OptimConfig(clip_in_step=True, state_dtype="bf16"),
}


def _optimizer_steps(sized: Sized, setting: Setting) -> Iterator[dict[str, Any]]:
    device = torch.device(setting.device)
    model = drawn(sized.config(), device)
    parameters, states = list(model.parameters()), {}
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def way(name: str, optim: OptimConfig) -> Callable[[], None]:
        states[name] = optimizer = optim.optimizer.build(parameter_groups(model, optim.optimizer), optim.lr)

        def step() -> None:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if optim.clip_in_step:
                optimizer.grad_scale = ((norm + 1e-6) / optim.grad_clip).clamp(min=1.0)  # type: ignore[attr-defined]
            else:
                nn.utils.clip_grads_with_norm_(parameters, optim.grad_clip, norm)
            optimizer.step()

        return step

    found = in_turn({name: way(name, optim) for name, optim in WAYS.items()}, device, setting.rounds, 2)
    for name, time in found.items():
        moments = [x for of_one in states[name].state.values() for x in of_one.values() if x.ndim]
        yield {
            "table": "A step of AdamW alone, with norm and clip",
            "model": sized.name,
            "way": name,
            "parameters": sum(p.numel() for p in parameters),
            "ms": 1000 * time.seconds,
            "over the first": time.ratio,
            "quartiles": f"{time.low:.3f}–{time.high:.3f}",
            "state, GiB": sum(x.nbytes for x in moments) / GIB,
        }


def cases(setting: Setting) -> list[Case]:
    """Return the cases by importance: first those with a limit, then the others, then the gain of compiling."""

    def run(sized: Sized, way: Way, seconds: float, wanted: float | None = None) -> Case:
        return Case(f"{sized.name}, {way}", partial(_run, sized, way, wanted), seconds)

    def against(sized: Sized, micro_batch: int, compiled: bool, seconds: float) -> Case:
        name = f"{sized.name} beside others, {'compiled' if compiled else 'eager'}"
        call: Callable[[Setting], Iterator[dict[str, Any]]] = partial(_against, sized, micro_batch, compiled)
        return Case(name, call, seconds)

    def steps(sized: Sized, seconds: float) -> Case:
        return Case(f"{sized.name}, steps of AdamW", partial(_optimizer_steps, sized), seconds)

    if setting.tiny:
        return [
            run(TINY, Way("no"), 0),
            run(TINY, Way("no", 4, **LEAN), 0),
            run(TINY, Way("no", trainer={"precision": "fp8"}), 0),
            against(TINY, 2, False, 0),
            against(TINY_GPT2, 2, False, 0),
            steps(TINY, 0),
        ]
    return [
        run(LLAMA_1B, Way("blocks"), 80, MFU),
        run(LLAMA_1B, Way("blocks", 4), 80, ACCUMULATED_MFU),
        run(LLAMA_1B, Way("blocks", **LEAN), 60, MFU),
        against(LLAMA_1B, 4, False, 80),
        against(GPT2_124M, 16, False, 40),
        run(LLAMA_1B, Way("no"), 50, MFU),
        steps(LLAMA_1B, 20),
        run(GPT2_124M, Way("no"), 30),
        run(GPT2_124M, Way("blocks"), 50),
        run(GPT2_124M, Way("step"), 90),
        run(LLAMA_1B, Way("blocks", trainer={"precision": "fp8"}), 80),
        run(LLAMA_1B, Way("blocks", autotune=True), 150, MFU),
        run(LLAMA_1B, Way("step"), 120, MFU),
        against(GPT2_124M, 16, True, 150),
    ]
