"""How samples are read from HDF5 files."""
