"""Parts of ``make gpu``, one file each."""
