"""Measurements against other engines, and the models they run on."""
