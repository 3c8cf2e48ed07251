"""Compare residual schemes: tune each, train seeds that did not tune, measure the cost of a step, and report."""
