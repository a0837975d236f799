"""Peers side by side: what redrive adds, in ratios from one run. `make bench ONLY=embedded`, or a row's own name."""
