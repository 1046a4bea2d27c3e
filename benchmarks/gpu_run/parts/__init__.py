"""One file per part of ``make gpu``."""
