"""Many runs, one question."""
