"""Rows and weights of a job over HTTP, for trainers and engines that are not Cadence's (docs/service.md)."""
