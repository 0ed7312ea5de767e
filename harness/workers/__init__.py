"""One loop each: read columns from the TransferQueue, compute, write columns."""
