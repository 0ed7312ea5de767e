"""The record book: how many seconds each schedule takes to get a frozen job to a held-out reward (docs/speedrun.md)."""
