import jax
import pytest


@pytest.fixture(scope="module")
def quick_compiles():
    """For tests that compile much and run little: three times as fast without XLA's optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
