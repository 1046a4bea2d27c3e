"""DeepSpeed's ZeRO as a strategy: its config, its sharding of a model on the meta device, its engine on GPU and CPU."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...errors import UsageError
from ...files import user_path
from ...locks import hold_lock
from ...models.birth import Sharder
from ...models.decoder import Decoder
from ...models.experts.routed_mlp import Mixture
from ...models.init import Linear
from ...models.tensor_shards import TensorShard, full_shape, shard_of
from ..checkpoints.stored_tensors import StoredTensor
from ..config import TrainerConfig
from ..optimizers.table import OptimizerConfig
from ..processes.process_group import TIMEOUT
from .sharded_checkpoints import ShardedCheckpoints
from .table import STRATEGIES


def _say(line: str) -> None:
    print(f"birthmark: {line}", file=sys.stderr, flush=True)


def _held(lock: Path) -> bool:
    """Return True if a build may be running: a visible process has the lock open, or this process cannot tell.

    Torch's lock is a file that exists while a build runs, open in the process that builds; a killed one leaves it.
    """
    facts = lock.stat()
    if facts.st_uid != os.getuid() or not Path("/proc/self/fd").is_dir():
        return True
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            its = descriptor.stat()
        except OSError:  # gone by now, or another user's
            continue
        if (its.st_dev, its.st_ino) == (facts.st_dev, facts.st_ino):
            return True
    return False


def load_operator(builder: Any) -> None:
    """Load one of DeepSpeed's operators, building it if needed. DeepSpeed itself then finds it loaded.

    Processes do so one after another, under a lock that ends with its process, so that the lock that torch's own
    builds leave when they are killed differs from that of a build that runs.
    """
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(builder.name, False))
    with hold_lock(f"{folder}.birthmark.lock"):
        lock = folder / "lock"
        if lock.exists() and _held(lock):
            _say(f"waiting for another process that builds DeepSpeed's {builder.name}; if none does, delete {lock}")
        elif lock.exists():
            lock.unlink()
            _say(f"{lock}: left by a build that was killed; removed")
        if not (folder / f"{builder.name}.so").is_file():
            _say(f"building DeepSpeed's {builder.name} in {folder}, this once: about 3 min on one core")
        # It prints its actions.
        with redirect_stdout(io.StringIO()):
            builder.load(verbose=False)


# ---------------------------------------------------------------- state of the optimizer
# Optimizer state inside a DeepSpeed engine, as shards of parameters, for saving to and loading from a checkpoint.
#
# ZeRO keeps one flat tensor per group of parameters and process. DeepSpeed decides the place of each parameter's
# range in it.


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


# ---------------------------------------------------------------- the strategy


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed for this kind of device, and let it join the existing process group.

    Raises:
        UsageError: DeepSpeed is not installed.
    """
    if device.type == "cpu":
        # DeepSpeed asks when it is imported, and takes a GPU where it finds one.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError:
        raise UsageError(
            "trainer.strategy zero1 to zero3 need DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed"
        ) from None
    # The build tool is installed beside Python, where a shell without an activated .venv does not look. It comes before
    # the system's: another version of ninja does not read its log, and rebuilds everything.
    beside = Path(sys.executable).parent
    if (beside / "ninja").is_file():
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    for message in (
        r".*all_gather_into_tensor.*deprecated",  # DeepSpeed's own use of torch
        r".*reduce_scatter_tensor.*deprecated",
        r"Since DeepSpeed handles gradient clipping",  # its config has the clip norm
    ):
        warnings.filterwarnings("ignore", message)
    # DeepSpeed would first find out which of its operators this machine can compile, and compile one that only its
    # inference and tensor parallelism call, for a minute. It asks this table, and goes without what is not in it.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist.get_backend(), timeout=TIMEOUT, verbose=False)


def check_drive(folder: Path) -> None:
    """Check that optimizer state can be kept on this node's drive.

    Raises:
        UsageError: ``folder`` is not writable, or DeepSpeed's operator for it cannot be built.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"trainer.offload_dir {folder}: cannot write there ({error.strerror}); give a folder on each node's drive"
        ) from None
    # Without one of them a rank would fail in the middle of the build, and the others wait for it.
    if shutil.which("ninja") is None or not AsyncIOBuilder().is_compatible(verbose=False):
        raise UsageError(
            "trainer.offload is nvme, but DeepSpeed's asynchronous I/O cannot be built: install libaio's headers and "
            "ninja (apt install libaio-dev; pip install ninja), or give cpu"
        )
    load_operator(AsyncIOBuilder())


def _class_names(kinds: list[type[Linear]]) -> list[str]:
    # Sharding makes subclasses of its own, which no module has by name.
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if not issubclass(kind, FSDPModule)]


def engine_config(config: TrainerConfig, grad_clip: float) -> dict[str, Any]:
    """Build DeepSpeed's config of a run: stage, precision, offload."""
    stage = STRATEGIES[config.strategy].zero_stage
    assert stage is not None, config.strategy
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": stage > 1}
    if stage == 3:
        # It would replace torch's own function in the whole process.
        zero["memory_efficient_linear"] = False
        # Experts of a block are gathered at once: so they run as one operator, as everywhere else.
        zero["leaf_module"] = {"classes": [f"{Mixture.__module__}.{Mixture.__qualname__}"]}
    if config.offload != "none":
        where: dict[str, Any] = {"device": config.offload, "pin_memory": torch.cuda.is_available()}
        if config.offload == "nvme":
            where["nvme_path"] = str(user_path(config.offload_dir))
        zero["offload_optimizer"] = where
        if stage == 3:
            # A drive is too slow for weights that every pass needs.
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_clipping": grad_clip,
        "zero_optimization": zero,
        # Weights stay float32 in each process; they are sent in the type that a pass uses.
        "torch_autocast": {
            "enabled": config.gathers_in == "bf16",
            "dtype": "bfloat16",
            # DeepSpeed asks for the very class, not for its kind.
            "lower_precision_safe_modules": _class_names([Linear, *Linear.__subclasses__()]),
        },
        # The optimizer is torch's, as in every other strategy.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def sharder(config: TrainerConfig, grad_clip: float) -> Sharder:
    """Return a function that shards a model on the meta device like ZeRO 3. Collective: call it on every rank.

    Stages 1 and 2 shard no weights.
    """
    import deepspeed

    settings = engine_config(config, grad_clip)
    settings["train_batch_size"] = config.micro_batch_size * dist.get_world_size()

    def shard(model: Decoder) -> None:
        context = deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.float32)
        taken: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in taken:
                    # Whole for a moment, in which DeepSpeed takes its part.
                    whole = torch.empty(parameter.shape, device=context.local_device)
                    taken[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                    context._zero_init_param(taken[parameter])
                module.register_parameter(name, taken[parameter])
        # A module's weights are gathered for its own pass; with tied embeddings the decoder uses another module's.
        deepspeed.zero.register_external_parameter(model, model.embed.weight)

    return shard


@runtime_checkable
class EngineModule(Protocol):
    """The part of the trained LightningModule that the strategy uses."""

    optimizer_config: OptimizerConfig
    """Settings of the optimizer, which say which part of its state is sharded."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, in the order of a single process."""

    def see_gradient_norm(self, norm: torch.Tensor) -> None:
        """Receive the norm of the whole gradient after every step, before clipping."""


class ZeroStrategy(ShardedCheckpoints, DeepSpeedStrategy):
    """Lightning's strategy for DeepSpeed, extended to processes without a GPU, which the original refuses."""

    def __init__(self, config: TrainerConfig, grad_clip: float) -> None:
        super().__init__(config=engine_config(config, grad_clip), timeout=TIMEOUT, logging_level=logging.ERROR)

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""
        assert self.parallel_devices is not None
        on_cpu = self.parallel_devices[0].type == "cpu"
        # DeepSpeed wants a number of every device.
        return torch.device("cpu", self.local_rank) if on_cpu else super().root_device

    def setup_environment(self) -> None:
        """Set up the environment without the check for a GPU."""
        assert self.accelerator is not None
        self.accelerator.setup_device(torch.device("cpu") if self.root_device.type == "cpu" else self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Set the ranks; the processes have joined already."""
        self.set_world_ranks()

    @property
    def _module(self) -> EngineModule:
        module = self.lightning_module
        assert isinstance(module, EngineModule)
        return module

    def _state(self) -> EngineState:
        parameters = list(in_number_order(self._module.parameter_groups()))
        return EngineState(self.deepspeed_engine, parameters, self._module.optimizer_config)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state like torch's optimizer in a single process, with this process's shard of each tensor."""
        numbers = iter(count())
        groups = [
            {
                **{name: value for name, value in of_engine.items() if name != "params"},
                "params": [next(numbers) for _ in of_module["params"]],
            }
            for of_engine, of_module in zip(optimizer.param_groups, self._module.parameter_groups(), strict=True)
        ]
        return {"state": self._state().shards(), "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state into the engine, whose weights are loaded by now."""
        (stored,) = checkpoint["optimizer_states"]
        self._state().load(stored["state"])
        for group, saved in zip(self.optimizers[0].param_groups, stored["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass without DeepSpeed's division by the micro-batches of a step: Lightning has divided the
        loss already.
        """
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the engine, which clips, and report its norm afterwards.

        The engine itself skips a step whose gradient is not finite, after waiting for the device: its norm is inf then.
        """
        steps = self.deepspeed_engine.is_gradient_accumulation_boundary()
        result = super().optimizer_step(*args, **kwargs)
        if steps:
            norm = torch.as_tensor(self.deepspeed_engine.get_global_grad_norm(), dtype=torch.float32)
            if norm.is_cpu:
                # With offload the engine has it on the host, and a skipped step's is a number. It goes to where losses
                # lie as an argument of a kernel: for a copy the host would wait.
                norm = torch.full((), norm.item(), device=self.root_device)
            self._module.see_gradient_norm(norm)
        return result
