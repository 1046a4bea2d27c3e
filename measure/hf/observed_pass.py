"""One observed pass of a model of ``transformers``: its hooks and attention last as long as the pass."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RunError, UsageError
from ...models.attention.fused.backends import over_heads
from ...models.attention.normalisers import WeightedSum
from ...models.observe import Attended, Observer, Sublayer, show_sublayer
from ...models.tensor_shards import full_shape
from ...models.user_classes import in_words
from .attention_scores import REPLACED_METHODS, Attending, ReadMask
from .family_places import EXPERTS, FamilyPlaces

# ---------------------------------------------------------------- expert units
# Hidden units of experts of ``transformers``, which are the input of no module there.
#
# All families keep their experts' maps in one module, as one tensor per map with an entry for each expert, and
# declare the layout. The activations are computed again: the library's way depends on the packages installed.
#
# Legend: N tokens, D width, K experts of a token, R tokens of one expert, F its hidden width.

#: Attributes by which a module of experts says how they are computed.
_SAID = ("num_experts", "down_proj", "has_gate", "has_bias", "is_transposed", "_apply_gate")


def expert_width(experts: Any) -> int:
    """Return the number of hidden units of an expert; 0 if the module does not show their computation."""
    if not all(hasattr(experts, name) for name in _SAID):
        return 0
    return full_shape(experts.down_proj)[1 if experts.is_transposed else 2]


def show_expert_units(
    show: Callable[[int, Tensor, Tensor], None], experts: Any, x_ND: Tensor, chosen_NK: Tensor, n_positions: int
) -> None:
    """Show each expert's (from 0) activations ``[R, F]``, for its tokens, and their positions ``[R]``.

    Args:
        show: called with them.
        experts: the module, whose weights are whole, or lie where ``accelerate`` keeps them.
        x_ND: input of the module, all positions of all sequences in one axis.
        chosen_NK: each token's experts.
        n_positions: T.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    with weights_in_memory(experts):
        weight, bias = getattr(experts, first), getattr(experts, f"{first}_bias", None)
        for expert in range(experts.num_experts):
            token_R = (chosen_NK == expert).any(-1).nonzero()[:, 0]
            map_of = weight[expert] if experts.is_transposed else weight[expert].T
            y = x_ND[token_R] @ map_of
            if experts.has_bias and bias is not None:
                y = y + bias[expert]
            show(expert, experts._apply_gate(y) if experts.has_gate else experts.act_fn(y), token_R % n_positions)


@contextmanager
def weights_in_memory(module: nn.Module) -> Iterator[None]:
    """Bring the module's weights into memory within the context, if ``accelerate`` keeps them elsewhere between
    passes.
    """
    if not hasattr(module, "_hf_hook"):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield


# ---------------------------------------------------------------- observed pass
# Observed pass of a model of ``transformers``, with hooks and replaced attention that are removed after it.
#
# Legend: B sequences, H query heads, G key/value heads, T positions, K head width, D width of the residual stream.

_NAME = "birthmark"
_IMPLEMENTATION = "_attn_implementation"
#: The MLP of a block with experts.
_MIXTURE = "mlp"

#: (number of a block, its attention, its values ``[B, H, T, K]``) → changes the value aggregation in place.
ChangeAttention = Callable[[int, WeightedSum, Tensor], None]

#: Modules of the blocks of passes under way → their pass.
_WATCHED: dict[nn.Module, ObservedPass] = {}


#: Buffers of more numbers are not copied: they hold masks and tables, which a pass does not write into.
_SMALL = 1 << 16
#: Attribute of rotary embeddings whose frequencies follow the longest sequence that they have seen.
_GROWN = "max_seq_len_cached"


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Give all modules the buffers back that they had before the context, and rotary embeddings their attributes."""
    attributes = {module: dict(vars(module)) for module in model.modules() if hasattr(module, _GROWN)}
    buffers = [
        (module, name, x, None if x.is_inference() else x._version, x.clone() if x.numel() <= _SMALL else None)
        for module in model.modules()
        for name, x in module._buffers.items()
        if x is not None
    ]
    try:
        yield
    finally:
        for module, before in attributes.items():
            for name in vars(module).keys() - before.keys():
                delattr(module, name)
            vars(module).update(before)
        for module, name, x, version, copy in buffers:
            module._buffers[name] = x
            if copy is not None and version is not None and x._version != version:
                with torch.no_grad():
                    x.copy_(copy)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode within the context, and run compiled ones uncompiled; each has its own mode
    and buffers again behind it.
    """
    modes = {module: module.training for module in model.modules()}
    # RWKV divides weights in place as it evaluates: a snapshot gives them back.
    rescaled: dict[Any, Any] = {m: m.layers_are_rescaled for m in modes if hasattr(m, "layers_are_rescaled")}
    model.eval()
    try:
        # A module compiled in place would compile hooks and the replaced attention too, or leave them out. Where
        # nothing has compiled, the compiler is not imported for this: that takes a second.
        is_loaded = "torch._dynamo" in sys.modules
        with _kept(model), torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
            yield
    finally:
        for module, was in rescaled.items():
            module.training = not was
            module._rescale_layers()
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def refusing(model: Any) -> Iterator[None]:
    """Refuse the model if anything fails within the context, where it is seen for the first time.

    Raises:
        UsageError: names the error, which is its cause.
    """
    try:
        yield
    except (UsageError, RunError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UsageError(f"this {type(model).__name__} cannot be measured: {in_words(error)}") from error


class ObservedPass:
    """A pass whose tensors are shown to an observer.

    Args:
        observer: receives the tensors.
        model_type: selects the replacements of attentions that do not run through the interface.
        places: names of modules inside a block; None if unknown.
        blocks: the model's blocks.
        decoder: the module that holds them, whose attentions are replaced.
        attends: True if attentions are seen.
        change: called with every seen attention before it is shown.
    """

    def __init__(
        self,
        observer: Observer,
        model_type: str,
        places: FamilyPlaces | None,
        blocks: Sequence[nn.Module],
        decoder: nn.Module,
        *,
        attends: bool,
        change: ChangeAttention | None = None,
    ) -> None:
        self.change = change
        self.observer, self.model_type, self.places = observer, model_type, places
        self.blocks, self.decoder, self.attends = blocks, decoder, attends
        self._masks: dict[int, tuple[Tensor, ReadMask]] = {}
        self._before_gate: dict[int, Attended] = {}
        self._rounds = False
        self.sees_later = False
        """True if a query of an attention so far sees later keys."""
        self.attention_modules: dict[nn.Module, None] = {}
        """Modules that have attended in the pass so far."""
        self.layer = 0
        """Number of the block under way; 0 between blocks."""

    # ---------------------------------------------------------------- attention

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        s_aux: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Compute an attention with the arguments of the library's interface: ``[B, H, T, K]``, ``[B, G, T, K]`` → the
        value aggregation ``[B, H, T, K]``.

        Raises:
            UsageError: no block is under way.
        """
        if not self.layer:
            raise UsageError(f"{type(module).__name__} attends outside of the blocks that are measured")
        causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) is not False
        mask = self._read(attention_mask, query.shape[2], sliding_window, causal=causal)
        self.sees_later |= mask.prefix is not None
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        # The shown tensors are those that the model uses: gradients flow back through them.
        k, v = (over_heads(x, query.shape[1]) for x in (key, value))
        attending = Attending.of(query, k, v, scale, mask, softcap=softcap, added=position_bias, sinks_H=s_aux)
        if self._rounds:
            return attending.rounded().to(value.dtype)
        self.attention_modules[module] = None
        weighted = attending.weighed()
        if self.change is not None:
            self.change(self.layer, weighted, v)
        o = weighted.o_BHTK
        attended = Attended(query, k, v, o, o, weighted)
        if self.places is not None and self.places.gated:
            self._before_gate[self.layer] = attended
        else:
            self.observer.attention(self.layer, attended)
        return o

    def _read(self, mask: Tensor | None, n_positions: int, window: int | None, *, causal: bool) -> ReadMask:
        if mask is None:
            return ReadMask.of(None, n_positions, window, causal=causal)
        if id(mask) not in self._masks:
            # Blocks share a mask; held here, no other gets its number.
            self._masks[id(mask)] = mask, ReadMask.of(mask, n_positions, window, causal=causal)
        return self._masks[id(mask)][1]

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Perturb attentions, within the context, by the rounding of their dtype, and do not show them."""
        self._rounds = True
        try:
            yield
        finally:
            self._rounds = False

    # ---------------------------------------------------------------- hooks

    @contextmanager
    def running(self) -> Iterator[None]:
        """Install hooks and replaced attention within the context."""
        with ExitStack() as stack:
            # Blocks may share a module, whose calls are those of one block after another.
            layers: dict[nn.Module, list[int]] = {}
            for layer, block in enumerate(self.blocks, start=1):
                layers.setdefault(block, []).append(layer)
            for block, of_block in layers.items():
                for handle in self._hooks(block, of_block):
                    stack.callback(handle.remove)
            if self.attends:
                stack.callback(self._forget)
                self._take_over(stack)
            yield

    def _take_over(self, stack: ExitStack) -> None:
        # Attentions move to the interface from version to version of the library.
        by_interface = getattr(self.decoder, "_supports_attention_backend", False)
        own = None if by_interface else REPLACED_METHODS.get(self.model_type)
        if own is not None and self.places is not None:
            for module in dict.fromkeys(block.get_submodule(self.places.attn) for block in self.blocks):
                _put(stack, module, own.method, own.make(module, partial(self.attend, module)))
            return
        _register()
        for block in self.blocks:
            _WATCHED.update(dict.fromkeys(block.modules(), self))
        found = [
            config for m in self.decoder.modules() if hasattr(config := getattr(m, "config", None), _IMPLEMENTATION)
        ]
        for config in {id(config): config for config in found}.values():
            stack.callback(setattr, config, _IMPLEMENTATION, getattr(config, _IMPLEMENTATION))
            setattr(config, _IMPLEMENTATION, _NAME)

    def _forget(self) -> None:
        for block in self.blocks:
            for module in block.modules():
                _WATCHED.pop(module, None)

    def _hooks(self, block: nn.Module, layers: Sequence[int]) -> Iterator[Any]:
        """Install the hooks that show the tensors of a module that is these blocks; yield their handles."""
        observer, places = self.observer, self.places
        x_BTD: list[Tensor] = []
        turns, layer = itertools.cycle(layers), 0

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal layer
            self.layer = layer = next(turns)
            x_BTD[:] = [input_of(args, kwargs)]
            if layer == 1:
                observer.residual("embedding", 0, x_BTD[0])

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x_BTD.clear()
            self.layer = 0
            observer.residual("mlp", layer, first_of(output))

        yield block.register_forward_pre_hook(enter, with_kwargs=True)
        yield block.register_forward_hook(leave)
        if places is None:
            return

        def within(hook: Callable[..., None]) -> Callable[..., None]:
            """Leave out calls in another block, with which this one may share a part."""
            return lambda *args: hook(*args) if x_BTD else None

        def rows(x: Tensor) -> Tensor:
            """Restore ``[B, T, …]``, since some MLPs get all positions of all sequences in one axis."""
            return x.reshape(*x_BTD[0].shape[:2], -1)

        def shown(site: Sublayer, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            show_sublayer(observer, site, layer, rows(first_of(output)))

        def after(seen: Tensor) -> None:
            observer.residual("attention", layer, rows(seen))

        after_attention = places.after_attention
        if (at := find(block, after_attention.module)) is not None:
            if after_attention.how == "input":
                yield at.register_forward_pre_hook(
                    within(lambda module, args, kwargs: after(args[0] if args else next(iter(kwargs.values())))),
                    with_kwargs=True,
                )
            elif after_attention.how == "output":
                yield at.register_forward_hook(within(lambda module, args, output: after(first_of(output))))
            else:
                yield at.register_forward_hook(within(lambda module, args, output: after(x_BTD[0] + first_of(output))))
        last = find(block, places.mlp.down)
        if last is not None:
            yield last.register_forward_pre_hook(within(lambda module, args: observer.neurons(layer, rows(args[0]))))
        else:
            last = find(block, _MIXTURE)
        outputs: list[tuple[Sublayer, nn.Module | None]] = [("attention", find(block, places.o)), ("mlp", last)]
        for site, module in outputs:
            if module is not None:
                yield module.register_forward_hook(within(partial(shown, site)))
        # (states, chosen experts, their weights) in all families.
        show_routing, show_units = getattr(observer, "routing", None), getattr(observer, "expert_units", None)
        if show_routing is not None and (experts := find(block, EXPERTS)) is not None:
            yield experts.register_forward_pre_hook(within(lambda module, args: show_routing(layer, rows(args[1]))))
        if show_units is not None and (experts := find(block, EXPERTS)) is not None and expert_width(experts):

            def units(module: nn.Module, args: tuple[Any, ...]) -> None:
                x_ND, chosen_NK = (x.flatten(0, -2) for x in args[:2])
                show_expert_units(partial(show_units, layer), module, x_ND, chosen_NK, x_BTD[0].shape[1])

            yield experts.register_forward_pre_hook(within(units))
        if self.attends and places.gated and (o := find(block, places.o)) is not None:
            yield o.register_forward_pre_hook(within(lambda module, args: self._gated(layer, args[0])))

    def _gated(self, layer: int, out: Tensor) -> None:
        if (attended := self._before_gate.pop(layer, None)) is not None:
            n_heads = attended.o_BHTK.shape[1]
            out_BHTK = out.unflatten(-1, (n_heads, -1)).transpose(1, 2)
            self.observer.attention(layer, replace(attended, out_BHTK=out_BHTK))


class Chain:
    """Record of a pass over a list of modules that may be the blocks of a model.

    Args:
        blocks: the modules; one may be in several places.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self.hands_on = False
        """True if the pass has called each in its place, and each has read what the one before gave."""
        self.repeats = False
        """True if the pass has called one more often than the list has it."""
        self._called: list[nn.Module] = []
        self._equal: list[bool] = []
        self._given: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the pass that is run within the context."""
        with ExitStack() as stack:
            for block in dict.fromkeys(self.blocks):
                stack.callback(block.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leave).remove)
            yield
        self._given = None
        self.hands_on = self._called == list(self.blocks) and all(self._equal)
        self.repeats = not Counter(self._called) <= Counter(self.blocks)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._called:
            read, given = input_of(args, kwargs), self._given
            both = isinstance(read, Tensor) and isinstance(given, Tensor) and read.shape == given.shape
            self._equal.append(both and _is_multiple(read, given))
        self._called.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given = output[0] if isinstance(output, (tuple, list)) else output
        self._given = given.clone() if isinstance(given, Tensor) else None


def _is_multiple(read: Tensor, given: Tensor) -> bool:
    """Return True if a model may have cast one tensor and multiplied it by a number to get the other, as RWKV does."""
    given = given.to(read.dtype)
    # The place of a NaN is named later.
    if torch.allclose(given, read, rtol=0, atol=0, equal_nan=True):
        return True
    largest = given.abs().argmax()
    factor = read.flatten()[largest] / given.flatten()[largest]
    return torch.allclose(given * factor, read, rtol=2 * torch.finfo(read.dtype).eps, atol=0)


def _put(stack: ExitStack, module: nn.Module, name: str, stand_in: Any) -> None:
    """Replace a module's method until the stack ends."""
    attributes = vars(module)
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name)
    attributes[name] = stand_in


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **more: Any
) -> tuple[Tensor, None]:
    """Compute the attention that ``transformers`` calls; returns ``[B, T, H, K]``."""
    if module not in _WATCHED:
        raise UsageError(f"{type(module).__name__} is no part of the blocks that are measured, and attends as they do")
    o_BHTK = _WATCHED[module].attend(module, query, key, value, attention_mask, *args, **more)
    return o_BHTK.transpose(1, 2).contiguous(), None


#: The first version in which each family's blocks and experts lie where they are looked for.
_LEAST = (5, 6)


def transformers_library(name: str) -> Any:
    """Import ``transformers``, to measure the model of this name.

    Raises:
        UsageError: it is not installed, or too old.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError(f"measuring {name} needs transformers: pip install transformers") from None
    if tuple(map(int, transformers.__version__.split(".")[:2])) < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise UsageError(
            f"measuring {name} needs transformers {least} or later, and this is {transformers.__version__}: "
            "pip install -U transformers"
        )
    return transformers


def _register() -> None:
    """Register this attention with ``transformers``, with masks like those of SDPA; repeated calls have no effect."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)


def find(block: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule of that name; None without one."""
    try:
        return block.get_submodule(name)
    except AttributeError:
        return None


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a block's input among the arguments of its call."""
    return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))


def first_of(output: Any) -> Tensor:
    """Return a module's output tensor: ``transformers`` gives a tensor, or a tuple or list that begins with it.

    Raises:
        UsageError: it gives something else.
    """
    found = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(found, Tensor):
        raise UsageError(
            f"a part of this model returns {type(found).__name__} in place of a tensor: it is not measured"
        )
    return found
