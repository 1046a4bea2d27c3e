"""The parts of ``on_gpu.py``: what a machine with a GPU is asked in its first hour."""
