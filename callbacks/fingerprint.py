"""The lineage test at every checkpoint: against the run's own birth, and against those of strangers as the control."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
from torch import nn

from ..measure.config import FingerprintConfig
from ..measure.hidden_states import FingerprintProbe, hidden_states
from ..metrics.seedprint import Fingerprint, HiddenStates, compare
from ..metrics.weight_kinship import Values, kinship
from ..models.decoder import Decoder
from ..models.tensor_shards import full_tensor
from .milestones import MilestoneCallback, log_metrics, never

#: Values of each matrix that are compared, from its middle; with so many a stranger's cosine has a standard deviation
#: of .016 for one matrix.
_N_VALUES = 4096


def sampled_weights(model: nn.Module) -> Values:
    """Return values of every matrix of a model, float32 ``[1, n]``.

    Collective: call on every rank if the model is sharded. Gathers one tensor at a time.
    """
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        flat = full_tensor(parameter.detach()).flatten()
        start = max((flat.numel() - _N_VALUES) // 2, 0)
        found[name] = flat[start : start + _N_VALUES].float().cpu().numpy()[None]
    return found


class FingerprintSnapshot(MilestoneCallback):
    """Callback that logs ``seedprint/…`` at every milestone (definitions §10, null ``dimensions``, random tokens).

    Of weights, ``weights`` is the mean cosine over matrices with this run's birth, ``weights_stranger`` that of the
    stranger it is largest for: training changes hidden states within some million tokens beyond recognition, weights
    far more slowly.

    ``z`` and ``log10_p`` are of the test against this run's birth, ``z_stranger`` is the largest of those against the
    strangers'; an undefined test is logged as missing. Births are re-created from their seeds, none is stored.

    Args:
        config: what to compare on.
        every: optimizer steps between tests.
        newborn: re-creates the birth of the same architecture from a seed.
        init_seed: this run's seed; strangers take the next ones.
        more: asks for further steps.
    """

    def __init__(
        self,
        config: FingerprintConfig,
        *,
        every: int,
        newborn: Callable[[int], Decoder],
        init_seed: int,
        more: Callable[[int], bool] = never,
    ) -> None:
        super().__init__(every, more=more)
        self.config, self.newborn, self.init_seed = config, newborn, init_seed
        self.probe = FingerprintProbe(n_inputs=config.n_inputs, seq_len=config.seq_len, probe_seed=config.probe_seed)
        self.births: list[tuple[HiddenStates, Values]] = []
        self.last: list[Fingerprint] = []

    def _evidence(self, model: Decoder) -> tuple[HiddenStates, Values]:
        return HiddenStates(hidden_states(model, self.probe, self.config.batch_size)), sampled_weights(model)

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Compare and log."""
        model = module.model
        assert isinstance(model, Decoder)
        if not self.births:
            seeds = range(self.init_seed, self.init_seed + self.config.n_strangers + 1)
            self.births = [self._evidence(self.newborn(seed).to(model.device)) for seed in seeds]
        hidden, weights = self._evidence(model)
        self.last = [compare(birth, hidden, vocab_size=model.config.vocab_size) for birth, _ in self.births]
        cosine, *of_strangers = (kinship(birth, weights).cosine for _, birth in self.births)
        own, *strangers = self.last
        figures = {"seedprint/z": own.z, "seedprint/log10_p": own.log10_p, "seedprint/weights": cosine}
        if strangers:
            figures["seedprint/z_stranger"] = max(stranger.z for stranger in strangers)
            figures["seedprint/weights_stranger"] = max(of_strangers, key=abs)
        log_metrics(trainer, figures, step)
