"""Compare residual schemes: tune each, train paired seeds that chose nothing, measure what a step costs, report."""
