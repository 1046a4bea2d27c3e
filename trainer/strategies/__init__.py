"""How a run is spread over processes."""
