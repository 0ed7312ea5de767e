"""Finished runs side by side: cells that are run or resumed, what may be compared, and what comes out."""
