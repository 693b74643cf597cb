"""Every test runs strictly: two virtual CPU devices, no silent rank promotion, warnings are errors."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
