"""What JAX finds and how fast it is, as one line of JSON. Run as a process of its own: a driver may hang."""

import json
import time
from collections.abc import Callable
from typing import Any

SECONDS_PER_RATE = 0.3


def probe() -> dict[str, Any]:
    """Devices, rates of matmul by dtype (GFLOP/s) and of memory (GB/s), and JAX's settings."""
    started = time.perf_counter()
    import jax
    import jax.numpy as jnp

    from shoal.app.assembly import use_compile_cache
    from shoal.mesh.devices import MATMUL_PRECISION

    use_compile_cache()
    settings: Any = jax.config
    devices = jax.devices()
    opened = time.perf_counter() - started
    kind = devices[0].platform
    side, length = (1024, 2**24) if kind == "cpu" else (8192, 2**28)
    matmul = {}
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = jnp.ones((side, side), dtype)
        for precision in ("highest", "default") if kind != "cpu" and dtype is jnp.float32 else ("highest",):
            multiply = jax.jit(lambda x, precision=precision: jnp.matmul(x, x, precision=precision))
            name = x.dtype.name + (" by default" if precision == "default" else "")
            matmul[name] = 2 * side**3 / _seconds(multiply, x) / 1e9
    moved = jnp.ones(length, jnp.float32)
    memory = 2 * moved.nbytes / _seconds(jax.jit(lambda x: x + 1), moved) / 1e9
    return dict(
        kind=kind,
        device=devices[0].device_kind,
        devices=len(devices),
        opened_s=opened,
        matmul=matmul,
        memory=memory,
        cache=settings.jax_compilation_cache_dir,
        precision=MATMUL_PRECISION,
    )


def _seconds(function: Callable[[Any], Any], x: Any) -> float:
    """Of one call: the best of as many as fit, after a first that compiles."""
    function(x).block_until_ready()
    best, end = float("inf"), time.perf_counter() + SECONDS_PER_RATE
    while time.perf_counter() < end:
        started = time.perf_counter()
        function(x).block_until_ready()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    print(json.dumps(probe()))
