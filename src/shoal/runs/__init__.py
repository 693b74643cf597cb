"""What one training leaves on disk: the run folder, its records, checkpoints, statistics and report.

Plain files that outlive the program and may be copied anywhere; nothing here knows an env or an algorithm.
Only `checkpoints` touches jax, so that listing and reporting runs starts at once.
"""
