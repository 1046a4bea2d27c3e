"""What is known of a corpus's documents before any is tokenised: hash, size, and where each belongs."""
