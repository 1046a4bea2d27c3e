"""Training steps of one shape in several libraries (``libraries.py``), each in a process of its own on the CPU.

A worker builds its model, says what it built, then answers each line it reads with the seconds of one step: rounds over
several workers interleave, and only one of them computes at a time. Every library gets the same batch, float32 weights
under the same autocast, the fused attention of torch, no key/value cache, and the fastest of the losses offered there.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from device import seconds
from libraries import LIBRARIES, CannotBuildError, Loss, Shape
from libraries import model_fields as llama
from torch import Tensor, nn

__all__ = ["KEEP_MEMORY", "Loss", "Shape", "Worker", "llama", "timed_step"]

#: An allocator that keeps what it got: no page of a step's large tensors is asked for again at the next step.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def timed_step(model: nn.Module, loss: Loss, batch: Tensor, bf16: bool) -> float:
    """Time forward, loss, backward, and dropping the gradients, in seconds."""

    def step() -> None:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=bf16):
            value = loss(model, batch)
        value.backward()
        model.zero_grad(set_to_none=True)

    return seconds(step, batch.device)


class Worker:
    """A process that takes one step for each line that it reads."""

    def __init__(
        self,
        python: Path | str,
        library: str,
        shape: Shape,
        *,
        bf16: bool,
        compiled: bool,
        threads: int,
        packages: Path | None = None,
    ) -> None:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), packages and str(packages)]))
        self.process = subprocess.Popen(
            [str(python), __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # One allocator setting for all: ours is what a run has.
            env={**os.environ, **KEEP_MEMORY, **({"PYTHONPATH": path} if path else {})},
        )
        spec = {"library": library, "shape": asdict(shape), "bf16": bf16, "compiled": compiled, "threads": threads}
        #: The worker's description of what it built: parameters, versions, its fastest loss; or the reason why there is
        #: nothing.
        self.built: dict[str, Any] = self._ask(json.dumps(spec))

    def step(self) -> float:
        """Take one step, and return its seconds."""
        return self._ask("step")

    def close(self) -> None:
        """End the process."""
        self.process.communicate()

    def _ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended with status {self.process.wait()}: see above")
        return json.loads(answer)


def serve() -> None:
    """Answer the requests of a :class:`Worker`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    spec = json.loads(sys.stdin.readline())
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    shape, name, bf16 = Shape(**spec["shape"]), spec["library"], spec["bf16"]
    try:
        model, losses = LIBRARIES[name](shape)
    except (ImportError, CannotBuildError) as error:
        print(json.dumps({"cannot": str(error), "installed": isinstance(error, CannotBuildError)}), file=answers)
        return
    batch = shape.batch()
    if spec["compiled"]:
        losses = {kind: torch.compile(loss) for kind, loss in losses.items()}
    best = {}
    for kind, loss in losses.items():
        timed_step(model, loss, batch, bf16)
        best[kind] = min(timed_step(model, loss, batch, bf16) for _ in range(3 if len(losses) > 1 else 1))
    chosen = min(best, key=lambda kind: best[kind])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        first_loss = losses[chosen](model, batch).item()
    built = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "version": importlib.metadata.version(name),
        "torch": torch.__version__,
        "loss": chosen,
        "losses, s": best,
        "first loss": first_loss,
    }
    print(json.dumps(built), file=answers)
    for _ in sys.stdin:
        print(json.dumps(timed_step(model, losses[chosen], batch, bf16)), file=answers)


if __name__ == "__main__":
    serve()
