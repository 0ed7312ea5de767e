"""What repeated runs say, and how surely: pure functions on arrays, without files and without pictures."""
