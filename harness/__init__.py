"""The harness: see docs/architecture.md. For use from Python there is the package `cadence`."""
