"""Tests against a real WebUI; see conftest.py for how to run them."""
