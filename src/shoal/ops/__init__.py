"""Reinforcement-learning maths on plain arrays, for one stream; knows no env, agent or device."""
