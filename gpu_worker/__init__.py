"""The GPU worker: loads a model once and serves it to the broker. Importing this loads no torch."""

import os as _os

# A step is hundreds of short parallel regions. While they wait for each other, torch's CPU threads should
# soon sleep, not spin: the broker and the frontends want the same cores, and a spinning thread uses up the
# time slice that its partner needs (measured beside one busy process: 86 ms a step instead of 207). Read
# when torch is first imported.
_os.environ.setdefault("GOMP_SPINCOUNT", "1000")
