"""Engines that let time pass instead of computing, on a virtual clock or a real one."""
