"""How to use so many devices: splits, layouts and staleness searched by bound, and judged by running schedule files."""
