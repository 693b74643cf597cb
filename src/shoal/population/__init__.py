"""P agents of one fingerprint as one program. Knows the Agent contract, never an algorithm."""
