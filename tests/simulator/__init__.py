"""Thousands of seeded histories: the real engine in a world of fake backends where anything may fail at any call."""
