"""Differential privacy for one site's updates: clipping, noise, calibration, and the ledger of spent budget."""
