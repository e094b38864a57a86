"""The model's step as one library, made by torch's compiler in a process of its own and kept on disk.

A child process traces and compiles while the worker serves eagerly, so no request waits and no token
stalls on Python's lock; the worker opens the result, lends it its own weights (nothing is copied) and
checks it against the eager step. The library takes any number of tokens and rows.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from . import native
from .attention import LayerPlan, PagedInput, cpu, plug_in
from .fused import GatedMlp, NormShape, RmsNorm, gated_names, norm_shapes
from .linears import Nf4Linear, Nf4Shape, PackedLinear, PackedShape, nf4_shapes, packed_shapes

#: Raised when what the library expects of its caller changes.
_VERSION: Final = 1

_NICENESS: Final = 15
_SMALL: Final = 16  # elements; the compiler writes up to 8 into the code
_PREFIX: Final = "model."  # of the weights' names inside `_Step`


class CompileFailed(Exception):  # noqa: N818 - the worker goes on eagerly
    """The step couldn't be compiled, or isn't right; the message says why."""


class Job(msgspec.Struct, frozen=True):
    """All that the child process needs to know."""

    model_class: str  # in transformers
    config: str  # JSON
    dtype: str  # such as bfloat16
    dtypes: dict[str, str]  # of each weight and buffer
    small: dict[str, list[float]]  # values of the smallest ones, which the compiler makes part of its code
    nf4: dict[str, Nf4Shape]  # the model's 4-bit layers
    packed: dict[str, PackedShape]  # and those whose weight is packed
    norms: dict[str, NormShape]  # its fused norms
    gated: list[str]  # and feed-forward layers
    layers: list[LayerPlan]
    page_tokens: int
    selects: bool  # the model's forward takes `logits_to_keep`
    kernels: str  # directory of our own kernels

    def key(self) -> str:
        """Names the library; another model, machine or version has another name."""
        digest = hashlib.sha256(msgspec.json.encode(self))
        library = native.load(Path(self.kernels)).name
        digest.update(repr((_VERSION, library, torch.__version__, transformers.__version__)).encode())
        digest.update(Path(__file__).read_bytes())
        return digest.hexdigest()[:20]


def job_for(
    model: nn.Module,
    layers: Sequence[LayerPlan],
    *,
    dtype: torch.dtype,
    page_tokens: int,
    selects: bool,
    kernels: Path,
) -> Job:
    """Describe the step of `model` to the child process.

    Raises:
        CompileFailed: for a model whose class the child couldn't build.
    """
    if getattr(transformers, type(model).__name__, None) is not type(model):
        raise CompileFailed(f"{type(model).__name__} isn't one of transformers' own models")
    foreign = {
        type(module).__name__ for module in model.modules() if "bitsandbytes" in type(module).__module__
    }
    if foreign:
        raise CompileFailed(f"{', '.join(sorted(foreign))} layers")
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    return Job(
        model_class=type(model).__name__,
        config=msgspec.json.encode(config, enc_hook=str).decode(),
        dtype=_name(dtype),
        dtypes={name: _name(tensor.dtype) for name, tensor in _weights(model).items()},
        small={
            name: tensor.flatten().tolist()
            for name, tensor in _weights(model).items()
            if tensor.numel() <= _SMALL
        },
        nf4=nf4_shapes(model),
        packed=packed_shapes(model),
        norms=norm_shapes(model),
        gated=gated_names(model),
        layers=list(layers),
        page_tokens=page_tokens,
        selects=selects,
        kernels=str(kernels),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


class CompiledStep:
    """An opened library: computes what the model's forward computes."""

    def __init__(self, library: Path, model: nn.Module) -> None:
        ours = torch.ops.loadonce
        self._handle = ours.open(str(library))
        weights = load_file(library.with_suffix(".safetensors"))
        weights.update({_PREFIX + name: tensor for name, tensor in _weights(model).items()})
        names = ours.names(self._handle)
        missing = [name for name in names if name not in weights]
        if missing:
            raise CompileFailed(f"the library wants {missing[:3]}, which the model hasn't")
        # The library reads them where they lie, so they must live as long as it does.
        self._weights = [weights[name].detach() for name in names]
        ours.give(self._handle, names, self._weights)

    def __call__(self, inputs: Sequence[Tensor], caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Inputs as `_Step.forward` has them → float32 [wanted, vocab]."""
        keys, values = zip(*caches, strict=True)
        return torch.ops.loadonce.run(self._handle, [*inputs, *keys, *values])


def start(job: Job, library: Path) -> subprocess.Popen[bytes]:
    """Begin to compile in a child process; `finish` says how it went."""
    with tempfile.NamedTemporaryFile("wb", suffix=".json", dir=library.parent, delete=False) as file:
        file.write(msgspec.json.encode(job))
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_worker.compiled", file.name, str(library), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),
        },
    )


def finish(child: subprocess.Popen[bytes]) -> None:
    """Wait for the child.

    Raises:
        CompileFailed: with the end of what it said.
    """
    _, said = child.communicate()
    if child.returncode:
        raise CompileFailed(f"exit code {child.returncode}: {said.decode(errors='replace')[-2000:]}")


# ── in the child process ─────────────────────────────────────────────────────────────────────────


class _Step(nn.Module):
    """The model with flat tensors for arguments, as torch's exporter wants it."""

    def __init__(self, model: nn.Module, layers: Sequence[LayerPlan], selects: bool) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.selects = selects

    def forward(  # noqa: PLR0913 - one for each of a batch's tensors, because that is what is traced
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        query_start: Tensor,
        context: Tensor,
        page_table: Tensor,
        wanted: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        paged = PagedInput(
            slots=slots,
            query_start=query_start,
            context=context,
            page_table=page_table,
            query_lens=(),
            context_lens=(),
            most_query=0,
            most_context=0,
            caches=list(zip(keys, values, strict=True)),
            layers=self.layers,
            attend=cpu.attend,
        )
        return forward(self.model, token_ids, positions, wanted, paged, selects=self.selects)


def forward(
    model: nn.Module,
    token_ids: Tensor,
    positions: Tensor,
    wanted: Tensor,
    paged: PagedInput,
    *,
    selects: bool,
) -> Tensor:
    """The model's forward over flat tokens [T] → float32 [wanted, vocab]."""
    keep = {"logits_to_keep": wanted} if selects else {}
    output = model(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        paged=paged,
        **keep,
    )
    logits = output.logits[0]
    return (logits if selects else logits[wanted]).float()


def _build(job: Job) -> nn.Module:
    """The model with weights of the right shapes and types, whose values are never looked at."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(job.config)
        config = transformers.AutoConfig.from_pretrained(folder)
    with transformers.initialization.no_init_weights():
        model = getattr(transformers, job.model_class)._from_config(config, dtype=getattr(torch, job.dtype))
    for name in job.gated:
        model.set_submodule(name, GatedMlp.empty())
    for name, norm in job.norms.items():
        model.set_submodule(name, RmsNorm.like(norm))
    for name, shape in job.nf4.items():
        model.set_submodule(name, Nf4Linear.like(shape))
    for name, kind in job.packed.items():
        model.set_submodule(name, PackedLinear.like(kind))
    for name, tensor in _weights(model).items():
        tensor.data = tensor.data.to(getattr(torch, job.dtypes[name]))
        if name in job.small:
            tensor.data.copy_(torch.tensor(job.small[name]).view_as(tensor))
    plug_in(model)
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(_keep_angles)
    return model.eval()


def _keep_angles(_: nn.Module, __: object, angles: object) -> object:
    """All layers turn by the same angles; the compiler would take their cosines in each layer anew."""
    if isinstance(angles, tuple) and all(isinstance(part, Tensor) for part in angles):
        return tuple(torch.ops.loadonce.keep(part) for part in angles)
    return angles


def _export(job: Job, model: nn.Module) -> torch.export.ExportedProgram:
    tokens, rows, pages = 7, 3, 5  # any numbers: all of these sizes are left open
    dtype = getattr(torch, job.dtype)

    def cache(layer: LayerPlan, dim: int) -> Tensor:
        return torch.zeros(pages, layer.kv_heads, job.page_tokens, dim, dtype=dtype).transpose(1, 2)

    keys = [cache(layer, layer.key_dim) for layer in job.layers]
    values = [cache(layer, layer.value_dim) for layer in job.layers]
    inputs = (
        torch.zeros(tokens, dtype=torch.long),
        torch.arange(tokens),
        torch.arange(tokens),
        torch.tensor([0, 2, 4, 7], dtype=torch.int32),
        torch.tensor([2, 2, 3], dtype=torch.int32),
        torch.zeros(rows, pages - 1, dtype=torch.int32),
        torch.arange(rows),
        keys,
        values,
    )
    open_size = torch.export.Dim.DYNAMIC
    one = {0: open_size}
    sizes = (one, one, one, one, one, {0: open_size, 1: open_size}, one, [one] * len(keys), [one] * len(keys))
    step = _Step(model, job.layers, job.selects)
    # Sizes of one are to be no special case: a single row is the commonest step of all.
    with torch.fx.experimental._config.patch(backed_size_oblivious=True), torch.no_grad():
        return torch.export.export(step, inputs, dynamic_shapes=sizes, strict=False)


def _compile(job: Job, library: Path) -> None:
    program = _export(job, _build(job))
    options = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.check_lowerbound": False,
        # Round where the eager step rounds: a stream may begin on the one and go on on the other.
        "emulate_precision_casts": True,
        # Between the kernels there is little to compute; a thread that waits for another costs more.
        "cpp.threads": 1,
    }
    scratch = library.with_suffix(".tmp")
    shutil.rmtree(scratch, ignore_errors=True)  # of a child that was killed; the lock makes it ours
    scratch.mkdir()
    package = scratch / "step.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)
    with zipfile.ZipFile(package) as archive:
        archive.extractall(scratch)
    [built] = scratch.rglob("*.so")
    # Numbers that the model's code makes a tensor of; weights and buffers the worker has itself.
    kept = {
        name: tensor.detach().clone()
        for name, tensor in program.constants.items()
        if isinstance(tensor, Tensor) and name.removeprefix(_PREFIX) not in job.dtypes
    }
    save_file(kept, library.with_suffix(".safetensors"))
    built.with_suffix(".json").replace(library.with_suffix(".json"))
    built.replace(library)  # last: whoever sees it may open it
    shutil.rmtree(scratch)


def _main(job_file: str, library: str, parent: int) -> None:
    os.nice(_NICENESS)
    ctypes.CDLL(None).prctl(
        1, signal.SIGTERM
    )  # PR_SET_PDEATHSIG: no orphan compiles for a worker that is gone
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    Path(job_file).unlink()
    if os.getppid() != parent:
        return
    torch.set_num_threads(1)
    native.load(Path(job.kernels))
    with open(library + ".lock", "w") as lock:  # several workers with one cache: one of them compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(library).exists():
            _compile(job, Path(library))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
