"""The sink of a real model: 60M parameters in the blocks, trained on text from one birth with and without an arm."""
