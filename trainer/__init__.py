"""Training: LightningModule, optimizer, schedules, checkpoints."""
