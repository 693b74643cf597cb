"""Drives an agent's `act` through environments and yields a Batch."""
