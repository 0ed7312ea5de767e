"""Statistics of repeated runs: pure functions on arrays, without files and without pictures."""
