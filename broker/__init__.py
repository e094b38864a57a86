"""LoadOnce's broker and, beside it, its public face: the wire protocol and the client library.

Public face (all that `http_frontend` and `gpu_worker` may import): `protocol`, `errors`, `calls`,
`client`, `options`, `logs`. The broker process: everything else. Nothing here imports torch.
"""
