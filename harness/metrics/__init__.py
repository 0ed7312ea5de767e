"""Staleness, ledger, timeline, and the files a run writes."""
