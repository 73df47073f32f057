"""Which rank hangs, where, and which ranks wait for it? Every rank reports about itself; any process can read the reports."""
