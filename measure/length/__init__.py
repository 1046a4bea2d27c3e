"""How far a model reads beyond the length that it was trained on, and what it costs when its first keys are gone."""
