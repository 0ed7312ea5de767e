"""Columns of rows: what cells hold, and how the cells of one put lie in memory."""
