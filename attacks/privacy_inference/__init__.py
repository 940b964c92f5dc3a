"""The Privacy Inference Attack of IntraShuffler, and stronger measures, on what the server saw."""
