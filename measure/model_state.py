"""Check that code from outside left a model, its gradients and the random states unchanged."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..models.tensor_shards import reshard


def version(tensor: Tensor) -> int:
    """Count the changes in place of a tensor and its views."""
    return -1 if tensor.is_inference() else tensor._version


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModelState:
    """State of a model and of random generators that a metric must not change. Checked around each call, without
    copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.named_modules())
        self.parameters = list(model.named_parameters())
        self.tensors = [*self.parameters, *model.named_buffers()]
        device = next(model.parameters()).device
        self.cuda = device if device.type == "cuda" else None

    def now(self) -> dict[str, Any]:
        """Return the current values to compare, by a phrase for each with its name in the model, if any."""
        found: dict[str, Any] = {}
        for name, x in self.tensors:
            found[f"changed {name}"] = version(x)
        for name, x in self.parameters:
            grad = x.grad
            found[f"changed the gradient of {name}"] = None if grad is None else (id(grad), version(grad))
            found[f"changed requires_grad of {name}"] = x.requires_grad
        for name, module in self.modules:
            found[f"changed the training mode of {name or 'the model'}"] = module.training
            found[f"changed the hooks of {name or 'the model'}"] = [len(getattr(module, kind)) for kind in _HOOKS]
        drew = "drew random numbers, which training would miss: {}; give it a generator of its own"
        found[drew.format("torch's")] = torch.get_rng_state().numpy().tobytes()
        if self.cuda is not None:
            found[drew.format("torch's on the GPU")] = torch.cuda.get_rng_state(self.cuda).numpy().tobytes()
        numpys: Any = np.random.get_state(legacy=True)
        found[drew.format("numpy's")] = (np.asarray(numpys[1]).tobytes(), numpys[2:])
        found[drew.format("Python's")] = random.getstate()
        found["changed whether gradients are on"] = torch.is_grad_enabled()
        return found

    def difference(self, before: Mapping[str, Any]) -> str | None:
        """Name the first difference in words; None if there is none."""
        now = self.now()
        return next((words for words, value in before.items() if now[words] != value), None)


class ModelDigest:
    """Sums over all bits of a model's parameters and gradients: they show changes that torch's count misses."""

    def __init__(self, model: nn.Module) -> None:
        # Weights that a strategy has gathered are freed before and after, so that the same tensors are compared.
        reshard(model)
        self.parameters = list(model.named_parameters())
        self.before = self._sums()

    def _sums(self) -> Tensor:
        sums = [_bits(x) for _, p in self.parameters for x in (p, p.grad)]
        device = next((total.device for total in sums if total.device.type != "cpu"), torch.device("cpu"))
        return torch.stack([total.to(device) for total in sums]) if sums else torch.zeros(0)

    def difference(self) -> str | None:
        """Name the first changed parameter in words; None if there is none."""
        changed = (self._sums() != self.before).nonzero().flatten().tolist()
        if not changed:
            return None
        name = self.parameters[changed[0] // 2][0]
        return f"changed {'the gradient of ' if changed[0] % 2 else ''}{name}"


def _bits(tensor: Any) -> Tensor:
    """Sum a tensor's bits as whole numbers; for a sharded one, those of this rank's shard."""
    if tensor is None or tensor.is_meta:  # accelerate keeps the weights elsewhere
        return torch.zeros((), dtype=torch.int64)
    held = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
    whole_numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return held.detach().view(whole_numbers[held.element_size()]).sum(dtype=torch.int64)
