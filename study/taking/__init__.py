"""Assignment of trials to processes, and their failures, shared on disk among the processes of a study."""
