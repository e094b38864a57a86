"""What the Makefile calls: install, run, lock, look at the shape, fill in the README."""
