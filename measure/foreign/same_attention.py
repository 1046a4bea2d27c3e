"""Whether the observed attention of a model of ``transformers`` is the model's own, as far as its dtype can tell.

Each attention module is compared alone: in the observed pass, what it gives is replaced by what it gave in the model's
own pass, so that the next one reads the same input in both, and no rounding adds up from block to block. How far the
two may differ is found in place: the module is called once more with every number in its attention moved by the
rounding of the dtype.

Legend: T positions, D width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .observed_pass import ObservedPass, first_of

#: How many times as far as the module that was moved a row, and all rows together, may be from the model's own. Seen at
#: most: half of that, over every family of the table in each dtype, eager and fused, also with scores of 100.
_ROW, _ROWS = 4.0, 2.0
#: The same of logits that follow from the same outputs of all attentions: as a rule they are equal.
_LOGITS = 4.0


class SameAttention:
    """The outputs of a model's attention modules in its own pass, and how far an observed pass is from them.

    Args:
        modules: the attention modules, each with the number of its block.
    """

    def __init__(self, modules: Mapping[nn.Module, int]) -> None:
        self.modules = modules
        self._own: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
        self._times: dict[int, float] = {}
        self._again = False

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside is the model's own pass, whose outputs are kept."""

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._own[module].append(first_of(output).clone())

        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_hook(keep).remove)
            yield

    @contextmanager
    def comparing(self, observed: ObservedPass) -> Iterator[None]:
        """Inside is the observed pass, which goes on with the model's own outputs."""
        calls = dict.fromkeys(self.modules, 0)

        def compare(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if self._again:
                return None
            own, calls[module] = self._own[module][calls[module]], calls[module] + 1
            self._again = True
            try:
                with observed.rounding():
                    moved = first_of(module(*args, **kwargs))
            finally:
                self._again = False
            layer = self.modules[module]
            self._times[layer] = max(self._times.get(layer, 0.0), times_allowed(own, first_of(output), moved))
            return _with_first(output, own.clone())

        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_hook(compare, with_kwargs=True).remove)
            yield

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Inside is a pass that goes on with the model's own outputs, each number moved by its rounding."""
        calls = dict.fromkeys(self.modules, 0)

        def move(module: nn.Module, args: Any, output: Any) -> Any:
            own, calls[module] = self._own[module][calls[module]], calls[module] + 1
            signs = torch.ones(own.shape[-1], dtype=own.dtype, device=own.device)
            signs[::2] = -1
            return _with_first(output, own * (1 + torch.finfo(own.dtype).eps * signs))

        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_hook(move).remove)
            yield

    def first_other(self) -> tuple[int, float] | None:
        """The first block whose attention is another one: its number, and how many times as far it is off as rounding
        allows; None where all are the model's own."""
        return next(((layer, times) for layer, times in sorted(self._times.items()) if times > 1), None)


def times_allowed(own: Tensor, observed: Tensor, moved: Tensor) -> float:
    """Distance of an observed output ``[…, T, D]`` from the model's own, over what is allowed; 0 where that cannot be
    said, as of what is not finite.

    Args:
        own: of the model.
        observed: what may differ by rounding.
        moved: the observed one, with its attention moved by rounding.
    """
    rounding = torch.finfo(own.dtype).eps / 2
    own_TD, observed_TD, moved_TD = (x.double().flatten(0, -2) for x in (own, observed, moved))
    # A channel of massive activations counts as much as another.
    size_D = own_TD.square().mean(0).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    off_T = ((observed_TD - own_TD) / size_D).norm(dim=1)
    allowed_T = ((moved_TD - observed_TD) / size_D).norm(dim=1) + rounding * (observed_TD / size_D).norm(dim=1)
    finite = off_T.isfinite() & allowed_T.isfinite()
    if not bool(finite.any()):
        return 0.0
    off_T, allowed_T = off_T[finite], allowed_T[finite].clamp_min(torch.finfo(torch.float64).tiny)
    return max(float((off_T / allowed_T).max()) / _ROW, float(off_T.norm() / allowed_T.norm()) / _ROWS)


def times_of_logits(off: Tensor, allowed: Tensor) -> float:
    """Distance of logits that follow from the same outputs of all attentions, over what is allowed.

    Args:
        off: the difference of an observed pass that went on with the model's own outputs.
        allowed: the difference of a pass that went on with these outputs moved by rounding.
    """
    return float(off.double().norm() / allowed.double().norm().clamp_min(torch.finfo(torch.float64).tiny)) / _LOGITS


def _with_first(output: Any, first: Tensor) -> Any:
    return (first, *output[1:]) if isinstance(output, tuple) else first
