"""What a federation learns: data sets, partitions, models and local training."""
