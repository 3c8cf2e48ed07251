"""Parts that any connection may use: state descriptions, memories, norms, projections, gates, options."""
