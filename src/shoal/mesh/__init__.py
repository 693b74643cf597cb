"""Devices and how a population is laid over them."""
