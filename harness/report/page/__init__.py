"""The report of a comparison: one HTML page that needs nothing else, and the same in Markdown."""
