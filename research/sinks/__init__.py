"""Measurements on the runs of the study of sinks."""
