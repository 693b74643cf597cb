"""Algorithms: each one file, each yields an Agent; update.py composes one update for all of them."""
