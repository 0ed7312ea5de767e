"""Facts that only a machine shows, asked of it part by part: `make gate-gpu` (docs/gpu.md). Parts that need a package
that is missing are left out, by name; torch, transformers and what reads settings are enough for most."""
