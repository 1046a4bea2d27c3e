"""How it is trained: LightningModule, optimizer, schedules, checkpoints."""
