"""Runs as YAML files; the dataclasses that they fill stand beside the code that they configure."""
