"""Costs fitted to times: of finished runs, and of the pieces of a profile."""
