"""Hang detection: which rank is stuck, where, and which ranks wait for it. Every rank reports about itself."""
