"""What does the reader want to try? The lessons, shown, run, and turned into exercises."""
