"""The bias snapshot: measured at birth, at every checkpoint and at the end, compared with birth and with strangers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import lightning as L
import numpy as np

from ..errors import RunError
from ..metrics.ranks import places, ranking
from ..models.decoder import Decoder
from .config import SnapshotConfig
from .loggers import log_snapshot
from .measure import BirthReference, Measurement, birth_reference, measure
from .ranks import from_first
from .records import RunDir, Snapshot
from .schedule import MilestoneCallback, log_metrics


class BiasSnapshot(MilestoneCallback):
    """Takes a :class:`Snapshot` of ``module.model`` at every milestone, writes it and logs its scalars.

    Nothing of the training state is read or changed but the weights: no random numbers are drawn, gradients, modes and
    compiled graphs stay as they are (the uncompiled module runs).

    Args:
        config: what to measure.
        every: optimizer steps between snapshots.
        run: where they are written.
        probes: token ids ``[N, T]`` by the name of the probe; ``random`` is the first.
        newborn: re-creates a birth of the same architecture from a seed.
        init_seed: this run's seed; strangers take the next ones.
        token_texts: text of token ids, for the ranked list.
        tokens_per_step: tokens in a global batch.
    """

    def __init__(
        self,
        config: SnapshotConfig,
        *,
        every: int,
        run: RunDir,
        probes: dict[str, np.ndarray],
        newborn: Callable[[int], Decoder],
        init_seed: int,
        token_texts: Callable[[Sequence[int]], list[str]],
        tokens_per_step: int,
    ) -> None:
        super().__init__(every)
        self.config, self.run, self.probes = config, run, probes
        self.newborn, self.init_seed, self.token_texts = newborn, init_seed, token_texts
        self.tokens_per_step = tokens_per_step
        self.birth: BirthReference | None = None
        self.strangers: list[BirthReference] = []
        self.last: Snapshot | None = None

    def _reference(self, model: Decoder) -> BirthReference:
        return birth_reference(model, self.probes["random"], self.config.batch_size)

    def _stored_references(self, step: int) -> list[BirthReference] | None:
        folder = self.run.snapshot(0)
        if step == 0 or not folder.is_dir():
            return None
        arrays = Snapshot.read(folder).arrays
        strange = zip(arrays["stranger_direction"], arrays["stranger_mean_prob"], strict=True)
        return [BirthReference(d, p) for d, p in [(arrays["mean_direction"], arrays["mean_prob"]), *strange]]

    def _find_references(self, model: Decoder, step: int) -> BirthReference:
        """The references from the snapshot at birth; measured where there is none yet."""
        if (stored := from_first(lambda: self._stored_references(step))) is not None:
            self.birth, *self.strangers = stored
        else:
            device = next(model.parameters()).device
            self.birth = self._reference(model if step == 0 else self.newborn(self.init_seed).to(device))
            self.strangers = [
                self._reference(self.newborn(self.init_seed + i).to(device))
                for i in range(1, self.config.n_strangers + 1)
            ]
        return self.birth

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Take the snapshot."""
        model = module.model
        assert isinstance(model, Decoder)
        birth = self.birth or self._find_references(model, step)
        start = time.perf_counter()
        by_probe = {name: self._measure(model, name, birth, step) for name in self.probes}
        self.last = snapshot = self._snapshot(model, by_probe, step, time.perf_counter() - start)
        from_first(lambda: snapshot.write(self.run.snapshot(step)))
        log_metrics(trainer, snapshot.scalars(), step)
        log_snapshot(trainer.loggers, snapshot)

    def _measure(self, model: Decoder, probe: str, birth: BirthReference, step: int) -> Measurement:
        batch_size, epsilon = self.config.batch_size, self.config.sink_epsilon
        try:
            return measure(
                model, self.probes[probe], birth, self.strangers, batch_size=batch_size, sink_epsilon=epsilon
            )
        except RunError as error:
            raise RunError(f"step {step}, {probe} probe: {error}; no snapshot is written") from None

    def _snapshot(self, model: Decoder, by_probe: dict[str, Measurement], step: int, seconds: float) -> Snapshot:
        assert self.birth is not None
        random = by_probe["random"]
        arrays = dict(random.arrays)
        if step == 0:
            arrays["stranger_direction"] = np.array([s.direction for s in self.strangers])
            arrays["stranger_mean_prob"] = np.array([s.mean_prob for s in self.strangers])
        summary = {
            "step": step,
            "tokens": step * self.tokens_per_step,
            "init_seed": self.init_seed,
            "probe": {
                "kind": "random",
                "n_sequences": self.config.n_sequences,
                "seq_len": self.config.seq_len,
                "probe_seed": self.config.probe_seed,
                "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            },
            "model": asdict(model.config),
            "n_layers": model.config.n_layers,
            "n_heads": model.config.n_heads,
            "vocab_size": model.config.vocab_size,
            "seconds": round(seconds, 4),
            "bias": random.scalars,
            "top_tokens": self._top_tokens(arrays["mean_prob"], arrays["argmax_share"]),
        }
        for name, found in by_probe.items():
            if name != "random":
                summary[f"bias_{name}"] = found.scalars
                arrays |= {f"{name}.{key}": value for key, value in found.arrays.items()}
        return Snapshot(summary, arrays)

    def _top_tokens(self, mean_prob_V: np.ndarray, argmax_share_V: np.ndarray) -> list[dict[str, object]]:
        assert self.birth is not None
        top = ranking(mean_prob_V)[: self.config.top_k]
        rank_at_birth = places(self.birth.mean_prob) + 1
        return [
            {
                "rank": rank,
                "id": int(token),
                "text": text,
                "p": float(mean_prob_V[token]),
                "argmax_share": float(argmax_share_V[token]),
                "rank_at_birth": int(rank_at_birth[token]),
            }
            for rank, (token, text) in enumerate(zip(top, self.token_texts(top.tolist()), strict=True), start=1)
        ]
