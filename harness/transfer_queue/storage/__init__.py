"""Where payloads are: knows frames and bytes, nothing of readiness or readers."""
