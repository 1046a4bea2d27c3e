"""One optimizer step of a planned run: the real model, sharded as the run would shard it, without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from .. import kernel_devices
from ..data.packing import DocumentBorders
from ..errors import UsageError
from ..models.attention.context_parallel import ContextGroup
from ..models.attention.fused.backends import FusedAttention, backend_for
from ..models.birth import Sharder, empty_decoder
from ..models.decoder import Decoder
from ..models.dropout import Dropout
from ..models.tensor_shards import full_tensor
from ..trainer.config import RunConfig, TrainerConfig
from ..trainer.module import PretrainModule, next_token_loss
from ..trainer.processes.process_group import TIMEOUT, join_context_group
from ..trainer.strategies.fsdp2 import reduce_gradients, unsharded_gradients
from .tracing import MANY, Curve, Ledger

# ---------------------------------------------------------------- kernels and autocast of a GPU

#: Functions that autocast runs in float32 on a GPU, and on a CPU in the dtype of its inputs: those that models call.
WIDE = {"layer_norm", "rms_norm", "norm", "softmax", "softplus", "logsumexp"}
WIDE |= {"exp", "log", "log2", "pow", "rsqrt", "sum", "cumsum"}
_LOW = (torch.bfloat16, torch.float16)


class _FusedRMSNorm(torch.autograd.Function):
    """Stand-in that keeps the tensors that the fused kernel keeps for its backward pass; it computes no values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, gain, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, gain, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(gain)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    return _FusedRMSNorm.apply(x, weight)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    out: Tensor = FusedAttention.apply(q, k, v, None, None, backend_for("cuda", q), scale, is_causal, None)[0]
    return out


#: Functions that run another kernel on a GPU, by name.
KERNELS: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
}


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


class _OnGPU(TorchFunctionMode):
    """Dispatch mode with the kernels and autocast of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in WIDE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, args), tree_map(_widened, kwargs)
        return KERNELS.get(name, func)(*args, **kwargs)


@contextmanager
def as_on(device: str) -> Iterator[None]:
    """Run passes over CPU tensors as on ``cuda``, or unchanged for ``cpu``. Only for fake tensors: the stand-ins for a
    GPU's kernels compute no values.
    """
    kernel_devices.chosen_for = device
    try:
        if device == "cpu":
            yield
        else:
            with _OnGPU():
                yield
    finally:
        kernel_devices.chosen_for = None


# ---------------------------------------------------------------- rehearsal of one optimizer step of a planned run
# The real model, sharded like in the run, without values.

#: Function from a trainer's config and a device to the function that shards a model over the processes.
Sharding = Callable[[TrainerConfig, torch.device], Sharder]


@contextmanager
def _group(n: int) -> Iterator[None]:
    """Simulate, within the context, rank 0 of a process group of ``n`` processes, of which no other exists."""
    if dist.is_initialized():
        raise UsageError(
            "a plan needs a process of its own, and this one is in a process group: run it without a launcher"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _update(module: PretrainModule, optimizer: torch.optim.Optimizer) -> None:
    """Run the update like the run does: norm of the whole gradient, clipping, the optimizer."""
    parameters = [p for p in module.model.parameters() if p.grad is not None]
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if module.optim.grad_clip > 0 and not module.optim.clip_in_step:
        torch.nn.utils.clip_grads_with_norm_(parameters, module.optim.grad_clip, norm)
    try:
        optimizer.step()
    except DataDependentOutputException:
        raise UsageError(
            f"optim.name is {module.optim.name}, whose steps depend on values that a rehearsal does not compute: plan "
            "with another, such as adamw, which needs more memory"
        ) from None


def _backward(loss: Tensor) -> None:
    # The engine that `loss.backward()` runs. A dispatch mode that sees that call does not see recomputation within.
    run = torch.autograd.Variable._execution_engine.run_backward
    run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]


def _step(
    module: PretrainModule, ledger: Ledger, micro_batch_size: int, whole: bool, context: ContextGroup | None
) -> None:
    """Run one optimizer step of two micro-batches, in the state after earlier steps."""
    parameters = list(module.model.parameters())
    optimizer = module.configure_optimizers()["optimizer"]
    ledger.mark(parameters, "parameters")

    def mark_gradients() -> None:
        ledger.mark([p.grad for p in parameters if p.grad is not None], "gradients")
        ledger.mark(unsharded_gradients(module), "gradients")

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: ledger.gradient(p.grad))
        parameter.grad = torch.zeros_like(parameter)
    mark_gradients()
    _update(module, optimizer)
    averages = [] if module.optim.ema is None else [p.detach().clone() for p in parameters]
    ledger.mark([*_states(optimizer), *averages], "optimizer")

    for nth in ("first", "later"):
        ledger.begin(f"{nth} forward")
        batch_BT = torch.zeros(micro_batch_size, module.model.config.max_seq_len + 1, dtype=torch.long)
        rates = module.model.config.dropout
        dropout = Dropout(rates, torch.zeros(micro_batch_size, dtype=torch.int32)) if rates.is_on else None
        # The token that ends documents does not matter: tensors hold no values.
        borders = DocumentBorders(0) if module.model.config.attention.documents else None
        with module.forward_context():
            loss = next_token_loss(
                module.model, batch_BT, module.optim.z_loss, borders, dropout, context=context
            ).objective
        if nth == "first":
            # Lightning frees the gradients of the previous step here.
            optimizer.zero_grad()
        ledger.begin(f"{nth} backward")
        reduce_gradients(module, nth == "later" or not whole)
        _backward(loss / 2)
        del loss, batch_BT
        mark_gradients()
    ledger.begin("update")
    _update(module, optimizer)


def rehearse(
    config: RunConfig,
    n_processes: int,
    *,
    shard: Sharding | None = None,
    device: Literal["cuda", "cpu"],
    micro_batch_size: int = MANY,
    whole: bool = False,
) -> Curve:
    """Run a step of two micro-batches of ``config`` as the first of ``n_processes``, on tensors without values.

    Args:
        config: the run; ``trainer.gather`` and ``trainer.replicas`` matter if the model is sharded.
        n_processes: processes of the run.
        shard: sharding of the model; by default every process holds all of it.
        device: device of the planned run.
        micro_batch_size: by default the result holds for all micro-batches, which needs kernels that do not depend on
            it: those of a GPU.
        whole: a process that shards sums the gradients of the first micro-batch whole, and reduces them after the
            second.
    """
    settings = replace(
        config.trainer,
        strategy="fsdp2" if shard else "single",
        replicas=config.trainer.replicas if shard else 1,
        gather=config.trainer.gathers_in if shard else "auto",
        reduce=config.trainer.reduce if shard else "fp32",
        accumulate="whole",
        # A product in fp8 keeps its arguments, as in bf16.
        precision="bf16" if config.trainer.precision == "fp8" else config.trainer.precision,
        offload="none",
        offload_dir="",
        compile="no",
    )
    with _group(n_processes):
        sharder = shard(settings, torch.device("cpu")) if shard else None
        context = join_context_group(settings.context_parallel, TIMEOUT) if settings.context_parallel > 1 else None
        # Sharded before there are fake tensors: sharding makes the shards of all processes and keeps one.
        model: Decoder = empty_decoder(config.model, "meta", sharder)
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            Ledger(mode, micro_batch_size) as ledger,
            as_on(device),
        ):
            model.to_empty(device="cpu").train()
            _step(PretrainModule(model, config.optim, settings), ledger, micro_batch_size, whole, context)
        return ledger.curve()
