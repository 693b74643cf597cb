"""The training loop, its chunks, every jit of a training program, signals, progress events."""
