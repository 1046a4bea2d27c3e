"""The lineage test at every checkpoint: against the run's own birth, and against those of strangers as the control."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L

from ..measure.config import FingerprintConfig
from ..measure.hidden_states import FingerprintProbe, hidden_states
from ..metrics.seedprint import Fingerprint, HiddenStates, compare
from ..models.decoder import Decoder
from .milestones import MilestoneCallback, log_metrics, never


class FingerprintSnapshot(MilestoneCallback):
    """Callback that logs ``seedprint/…`` at every milestone (definitions §10, null ``dimensions``, random tokens).

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
        self.births: list[HiddenStates] = []
        self.last: list[Fingerprint] = []

    def _hidden(self, model: Decoder) -> HiddenStates:
        return HiddenStates(hidden_states(model, self.probe, self.config.batch_size))

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Compare and log."""
        model = module.model
        assert isinstance(model, Decoder)
        if not self.births:
            device = next(model.parameters()).device
            seeds = range(self.init_seed, self.init_seed + self.config.n_strangers + 1)
            self.births = [self._hidden(self.newborn(seed).to(device)) for seed in seeds]
        now = self._hidden(model)
        self.last = [compare(birth, now, vocab_size=model.config.vocab_size) for birth in self.births]
        own, *strangers = self.last
        figures = {"seedprint/z": own.z, "seedprint/log10_p": own.log10_p}
        if strangers:
            figures["seedprint/z_stranger"] = max(stranger.z for stranger in strangers)
        log_metrics(trainer, figures, step)
