"""Will it fit: a rehearsed step, a ledger of its memory, and GPUs."""
