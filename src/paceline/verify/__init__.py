"""Whether a training gives the same bits at every world size and after every crash."""
