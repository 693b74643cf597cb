"""Every test has eight virtual CPU devices; warnings are errors (see pyproject.toml)."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")
# Compiling is most of what tests do and takes half as long unoptimised; `XLA_FLAGS= pytest` does as users do.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.devices()  # start the backend now, so that no test can change it
