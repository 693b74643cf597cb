"""Values of true next observations: the shortcut gives what reading all of them would."""

import jax
import jax.numpy as jnp
import numpy as np

from shoal.ops.bootstrap import values


def test_values_bootstrap_from_the_true_next_observation_of_every_row():
    """Few final observations are read; the answer is as if all had been."""
    rng = np.random.default_rng(0)
    steps, envs = 7, 5
    obs, final = (jnp.asarray(rng.normal(size=(steps, envs, 2)), jnp.float32) for _ in range(2))
    truncated = rng.random((steps, envs)) < 0.4
    truncated[:, 0], truncated[:, 1] = True, False
    going = ~truncated
    final = final.at[:-1].set(jnp.where(going[:-1, :, None], obs[1:], final[:-1]))
    read = lambda obs: obs @ jnp.asarray([1.0, 10.0])
    value, following = jax.jit(lambda *arrays: values(read, *arrays))(obs, final, jnp.asarray(truncated))
    np.testing.assert_allclose(value, read(obs), rtol=1e-5)
    np.testing.assert_allclose(following, read(final), rtol=1e-5)
