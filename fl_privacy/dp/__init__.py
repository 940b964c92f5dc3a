"""Differential privacy of one site's update: clipping, noise, calibration, and the ledger of what was spent."""
