"""Every test has eight virtual CPU devices; warnings are errors (see pyproject.toml)."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.devices()  # start the backend now, so that no test can change it
