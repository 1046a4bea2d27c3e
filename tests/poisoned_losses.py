"""A training step whose loss is NaN, but for the buffers that its pass moves: also for scripts of other processes."""

from birthmark.trainer.module import PretrainModule

_training_step = PretrainModule.training_step


def poisoned(when):
    """``PretrainModule.training_step`` with a NaN where ``when(module, index of the micro-batch)``."""

    def training_step(self, batch, index):
        loss = self._loss
        if when(self, index):
            self._loss = lambda *inputs: _spoilt(loss(*inputs))
        try:
            return _training_step(self, batch, index)
        finally:
            self._loss = loss

    return training_step


def _spoilt(losses):
    return losses._replace(objective=losses.objective * float("nan"))
