"""Sets that are never whole on the disk: read file by file, tokenised ahead, found again to the token."""
