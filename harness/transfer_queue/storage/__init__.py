"""Storages of payloads: know frames and bytes, nothing of readiness or readers."""
