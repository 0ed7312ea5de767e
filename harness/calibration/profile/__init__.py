"""Times of the embedded engines on this machine's device, and costs fitted to them. Needs no Ray, Hydra or MLflow."""
