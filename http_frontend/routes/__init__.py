"""The routes, one file for each; every handler is a function of (frontend, request)."""
