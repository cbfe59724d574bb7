"""Trains the small Stable Diffusion model that the demo and the tests use."""
