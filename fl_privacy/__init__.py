"""Private federated learning: five published defences, one federation, and the attacks that measure them."""

__version__ = "0.1.0"
