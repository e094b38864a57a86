"""The GPU worker: loads a model once and serves it to the broker. Importing this loads no torch."""
