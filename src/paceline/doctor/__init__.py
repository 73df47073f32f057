"""Checks of this machine or of several hosts. Each gathers facts and judges them in a pure function."""
