"""Plan of a run, to see if it fits: a rehearsed step, a ledger of its memory, and GPUs."""
