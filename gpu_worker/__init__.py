"""The GPU worker: loads a model once and serves it to the broker. Importing this loads no torch."""

import os as _os

# While torch's CPU threads wait for each other they should soon sleep, not spin: the broker and the frontends
# want the same cores, and a spinning thread uses up the time slice that its partner needs (measured beside
# one busy process: 86 ms a step instead of 207). Read when torch is first imported.
_os.environ.setdefault("GOMP_SPINCOUNT", "1000")
