"""The control plane at work inside one event loop."""
