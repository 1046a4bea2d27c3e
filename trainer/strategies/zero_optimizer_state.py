"""Optimizer state inside a DeepSpeed engine, as shards of parameters, for saving to and loading from a checkpoint.

ZeRO keeps one flat tensor per group of parameters and process. DeepSpeed decides the place of each parameter's range in
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...models.tensor_shards import TensorShard, full_shape, shard_of
from ..checkpoints.stored_tensors import StoredTensor
from ..optimizers.table import OptimizerConfig


class EngineState:
    """State of an optimizer of this package under ZeRO.

    Args:
        engine: DeepSpeed's engine.
        parameters: parameters in the order in which the optimizer of a single process numbers them.
        config: settings of the optimizer, which say which part of its state is sharded.
    """

    def __init__(self, engine: Any, parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> None:
        self.optimizer, self.stage = engine.optimizer, engine.zero_optimization_stage()
        self.parameters, self.config = parameters, config

    def _flat(self) -> Sequence[Tensor]:
        """Return the flat tensors of this process, which the inner optimizer steps."""
        zero = self.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def _shard(self, parameter: nn.Parameter, key: str) -> TensorShard:
        from deepspeed.utils import safe_get_local_optimizer_state

        if self.stage == 3:
            held = shard_of(parameter)
            return TensorShard(
                safe_get_local_optimizer_state(parameter, key)[: held.local.numel()], held.start, held.shape
            )
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # other processes hold all of it
            return TensorShard(torch.empty(0), 0, full_shape(parameter))
        flat, here = self._flat()[mapping.param_group_index], mapping.hp_fragment_address
        local = self.optimizer.optimizer.state[flat][key].view(-1)[here.start : here.start + here.numel]
        return TensorShard(local, mapping.lp_fragment_address.start, full_shape(parameter))

    def shards(self) -> dict[int, dict[str, Any]]:
        """Return this process's part of every parameter's state, by number."""
        inner = self.optimizer.optimizer.state
        if not any(inner.get(flat) for flat in self._flat()):
            return {}  # no step yet
        stepped = next(inner[flat] for flat in self._flat() if inner.get(flat))
        numbers = {key: stepped[key].detach().cpu() for key in self.config.replicated_state}
        return {
            number: {**numbers, **{key: self._shard(parameter, key) for key in self.config.sharded_state}}
            for number, parameter in enumerate(self.parameters)
        }

    def load(self, stored: Mapping[int, Mapping[str, Any]]) -> None:
        """Load this process's part of every parameter's state from a checkpoint, with the current weights."""
        from deepspeed.utils import safe_set_local_optimizer_state

        self.optimizer.refresh_fp32_params()
        if not stored:
            return
        inner = self.optimizer.optimizer.state
        for flat in self._flat():
            inner[flat] = {key: _number(stored[0][key]).to(flat.device) for key in self.config.replicated_state}
            inner[flat] |= {key: torch.zeros_like(flat, requires_grad=False) for key in self.config.sharded_state}
        for number, parameter in enumerate(self.parameters):
            for key in self.config.sharded_state:
                values = stored[number][key]
                if self.stage < 3:
                    shard = self._shard(parameter, key)
                    shard.local.copy_(values.read(shard.start, shard.stop).view(-1))
                else:
                    held, padded = shard_of(parameter), torch.zeros_like(parameter.ds_tensor)  # type: ignore[attr-defined]
                    padded[: held.local.numel()] = values.read(held.start, held.stop).view(-1)
                    safe_set_local_optimizer_state(parameter, padded, key)


def _number(stored: Any) -> Tensor:
    """Convert a number of a checkpoint to the form that an optimizer keeps."""
    value = stored.whole() if isinstance(stored, StoredTensor) else stored
    return torch.as_tensor(value, dtype=torch.float32).clone()


def in_number_order(groups: Sequence[Mapping[str, Any]]) -> Iterator[nn.Parameter]:
    """Yield the parameters of an optimizer's groups in their numbers' order."""
    for group in groups:
        yield from group["params"]
