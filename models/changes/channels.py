"""Changes of coordinates of the residual stream that leave the function of a model unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import UsageError
from ..config import ModelConfig
from ..keyed_random import keyed_generator
from .change import Change, ModelWeights, wide
from .residual_stream import check_channels, check_known_gate, in_other_coordinates, with_gains


@dataclass(frozen=True)
class ChannelPermutation(Change):
    """The channels of the residual stream in a random order."""

    def check(self, config: ModelConfig) -> None:
        """See :class:`Change`."""
        check_channels(config, "permute_channels")

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        order = keyed_generator(seed, "channels").permutation(model.config.d_model)

        def move(tensor: Tensor, axis: int) -> Tensor:
            return tensor.index_select(axis, torch.from_numpy(order).to(tensor.device))

        return in_other_coordinates(model, move, lambda gain_D: move(gain_D, 0))


@dataclass(frozen=True)
class SignFlips(Change):
    """Random channels of the residual stream change their sign."""

    share: float = 0.5
    """Share of the channels that are negated; 1 negates all."""

    def problems(self) -> list[str]:
        """See :class:`Change`."""
        return [] if 0 < self.share <= 1 else [f"share is {self.share}: give a share above 0, at most 1"]

    def check(self, config: ModelConfig) -> None:
        """See :class:`Change`."""
        check_channels(config, "flip_signs")
        if config.norm == "layernorm" and self.share < 1:
            raise UsageError(
                "flip_signs: model.norm layernorm takes the mean over channels, so that only all of them together can "
                "change their sign: give share 1"
            )

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        sign_D = np.ones(model.config.d_model)
        flipped = keyed_generator(seed, "signs").permutation(len(sign_D))[: max(round(self.share * len(sign_D)), 1)]
        sign_D[flipped] = -1

        def move(tensor: Tensor, axis: int) -> Tensor:
            sign = torch.from_numpy(sign_D).to(tensor)
            return tensor * (sign[:, None] if axis == 0 and tensor.ndim == 2 else sign)

        return in_other_coordinates(model, move, lambda gain_D: gain_D)


@dataclass(frozen=True)
class ChannelScaling(Change):
    """Scaling of every channel of a norm's output, undone by the matrices behind it.

    The residual stream stays as it is, but the final hidden states do not. A tied head gets a separate table.
    """

    factor: float = 4.0
    """Largest scale; scales are drawn log-uniformly between its inverse and itself."""

    def problems(self) -> list[str]:
        """See :class:`Change`."""
        return [] if 1 < self.factor <= 1e3 else [f"factor is {self.factor}: give a number above 1, at most 1000"]

    def check(self, config: ModelConfig) -> None:
        """See :class:`Change`."""
        check_known_gate(config, "scale_channels")
        if config.norm == "none":
            raise UsageError("scale_channels: model.norm none has no gains to scale")

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""

        def scaled(norm: str, gain_D: Tensor) -> Tensor:
            exponent_D = keyed_generator(seed, "scales", norm).uniform(-1, 1, len(gain_D))
            return gain_D * torch.from_numpy(self.factor**exponent_D).to(gain_D)

        return with_gains(model, scaled)


@dataclass(frozen=True)
class Rotation(Change):
    """The residual stream turned by a random orthogonal matrix, uniform among those that the architecture allows.

    Gains of norms are moved into the matrices behind them first (QuaRot, arXiv 2404.00456). Under layer norm, whose
    mean over channels must stay, directions across (1, …, 1) turn.
    """

    def check(self, config: ModelConfig) -> None:
        """See :class:`Change`."""
        check_channels(config, "rotate")
        if config.norm == "dyt":
            raise UsageError("rotate: model.norm dyt bends each channel by itself, and no rotation passes that")
        if config.norm != "none" and config.norm_placement != "pre":
            raise UsageError(
                f"rotate: model.norm_placement {config.norm_placement} puts gains between a norm and the residual "
                "stream, where no rotation passes them"
            )

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        config = model.config
        turn_DD = random_rotation(config, seed)

        def move(tensor: Tensor, axis: int) -> Tensor:
            turn = turn_DD.to(tensor.device)
            return (turn @ wide(tensor) if axis == 0 else wide(tensor) @ turn.T).to(tensor.dtype)

        plain = with_gains(model, lambda norm, gain_D: torch.ones_like(gain_D)) if config.norm != "none" else model
        return in_other_coordinates(plain, move, lambda gain_D: gain_D)


def random_rotation(config: ModelConfig, seed: int) -> Tensor:
    """Draw a random orthogonal matrix, float64 ``[D, D]``; under layer norm one that fixes (1, …, 1).

    Uniform (Haar): Q of a normal matrix, with the signs of R's diagonal (arXiv math-ph/0609050).
    """
    d = config.d_model
    fixed = int(config.norm == "layernorm")
    drawn = keyed_generator(seed, "rotation").standard_normal((d - fixed, d - fixed))
    q, r = np.linalg.qr(drawn)
    turn = q * np.sign(np.diagonal(r))
    if fixed:
        # An orthonormal basis that begins with the mean's direction.
        basis, _ = np.linalg.qr(np.column_stack([np.ones(d), np.eye(d)[:, 1:]]))
        whole = np.eye(d)
        whole[1:, 1:] = turn
        turn = basis @ whole @ basis.T
    return torch.from_numpy(turn)
