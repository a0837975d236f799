"""Chaos: the product as separate processes that die at named points, and a judge who trusts none of them."""
