"""Read samples from HDF5 files."""
