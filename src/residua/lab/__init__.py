"""The laboratory: data, training, evaluation, inspection, cost, studies and geometry experiments."""
