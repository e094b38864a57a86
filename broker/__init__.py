"""LoadOnce's broker and, beside it, its public face: the wire protocol and the client library.

Public face (all that `http_frontend` and `gpu_worker` may import): `protocol`, `errors`, `calls`,
`requests`, `client` with its `async_client`, `listeners` and `wire`, `curve`, `options`, `logs`,
`addresses`, `lifeline`. The broker process: everything else.
Nothing here imports torch.
"""

from broker.client import AsyncClient, AsyncStream, Client, Stream
from broker.errors import LoadOnceError
from broker.requests import Completion

__all__ = ["AsyncClient", "AsyncStream", "Client", "Completion", "LoadOnceError", "Stream"]
