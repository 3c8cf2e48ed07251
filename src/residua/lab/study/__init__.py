"""Compare residual schemes: tune each, train it with several seeds, measure the cost of a step, and report."""
