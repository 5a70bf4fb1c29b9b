"""The loader: what a training loop takes next, and how it is there in time."""
