"""Advantage estimators, losses and off-policy corrections: pure functions on tensors."""
