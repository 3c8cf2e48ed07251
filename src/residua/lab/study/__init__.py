"""Compare residual schemes: tune each, train seeds not used for tuning, measure the cost of a step, and report."""
